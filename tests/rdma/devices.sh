# In the guest. With a network card: rxe0 on it. Without: rxe0 on the loopback interface, which its driver short-cuts, and rxa
# and rxb at the two ends of a veth pair, with every packet between 10.8.0.1 and 10.8.0.2 over that wire, although both ends
# are in one network namespace (the driver receives in the first one only).
set -e
if [ -e /sys/class/net/eth0 ]; then
    ip addr add "10.9.0.${FASTDECODE_RDMA_WIRE#guest }/24" dev eth0
    ip link set eth0 up
    rdma link add rxe0 type rxe netdev eth0
    return
fi
rdma link add rxe0 type rxe netdev lo
ip link add va type veth peer name vb
for i in va vb; do
    ip link set $i mtu 9000
    echo 0 >/proc/sys/net/ipv4/conf/$i/rp_filter
    echo 1 >/proc/sys/net/ipv4/conf/$i/accept_local
    echo 1 >/proc/sys/net/ipv4/conf/$i/arp_ignore
done
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
ip addr add 10.8.0.1/32 dev va
ip addr add 10.8.0.2/32 dev vb
ip link set va up
ip link set vb up
# What came in from the wire is for this host; what is made here goes over the wire first.
ip rule add pref 1 iif va lookup local
ip rule add pref 1 iif vb lookup local
ip route add 10.8.0.2 dev va src 10.8.0.1 table 77
ip route add 10.8.0.1 dev vb src 10.8.0.2 table 77
ip rule add pref 2 lookup 77
ip rule add pref 3 lookup local
ip rule del pref 0
rdma link add rxa type rxe netdev va
rdma link add rxb type rxe netdev vb
