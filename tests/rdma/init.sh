#!/bin/busybox sh
# The guest's /init: loads the modules, puts a writable layer over the host's files, runs one command, powers off.
B=/bin/busybox
$B mount -t proc proc /proc
$B mount -t sysfs sys /sys
$B mount -t devtmpfs dev /dev
while read -r m; do $B insmod "/m/$m.ko" || echo "guest: insmod $m failed"; done </modules

P=trans=virtio,version=9p2000.L,msize=262144
$B mount -t 9p -o $P,ro,cache=loose host /host || echo "guest: the host's files cannot be mounted"
$B mount -t 9p -o $P,ro,cache=loose extra /extra || echo "guest: the packages cannot be mounted"
$B mount -t tmpfs -o mode=755 tmpfs /rw
$B mkdir /rw/up /rw/work
$B mount -t overlay -o lowerdir=/extra:/host,upperdir=/rw/up,workdir=/rw/work overlay /root

$B mkdir -p /root/proc /root/sys /root/dev /root/run /root/tmp /root/mnt/out
$B mount -t proc proc /root/proc
$B mount -t sysfs sys /root/sys
$B mount -t devtmpfs dev /root/dev
$B mkdir -p /root/dev/pts /root/dev/shm
$B mount -t devpts devpts /root/dev/pts
$B mount -t tmpfs -o mode=1777 tmpfs /root/dev/shm
$B mount -t tmpfs -o mode=755 tmpfs /root/run
$B mount -t 9p -o $P,cache=none out /root/mnt/out || echo "guest: no way to report back"
$B ln -sf /proc/self/fd /root/dev/fd
$B ip link set lo up

out=/dev/null
for port in /sys/class/virtio-ports/*; do
    read -r name <"$port/name" && [ "$name" = command.out ] && out=/root/dev/${port##*/}
done
$B chroot /root /bin/sh /mnt/out/command.sh >"$out" 2>&1 </dev/null
echo $? >/root/mnt/out/status
$B sync
$B poweroff -f
