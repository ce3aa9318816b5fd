"""Links: how the two ends of an activation region see each other's writes, and the control messages beside it.

base             the interfaces: Link of an S-node, LinkService and LinkGrant of an R-node, and their errors
registry         the table of transports by URL scheme; connect, dial and serve
shm, tcp, rdma   the transports
link             RegionLink: the S side of an open link, for every transport
server           the R side, for every transport
connections      connections up to the end of their hand-shake
handshake        the hand-shake; session has the keys and MACs of a link
messages         the control messages; frames sends and receives them
migration        connections over which R-nodes send each other KV pages
partition        how a team of R-nodes shares sequences: team by heads, token_team by tokens
rank_team        the links of all ranks to one R-node, as one link
loopback         a data path without an R-node, to time the S-Part alone
rdma_devices, rdma_endpoint  RDMA ports and GIDs; queue pairs by pyverbs

In C, port.h is the data path of the S side: StepGroup (py_group.c) drives the slots of several ports, await.c waits for
them, and proxy.h serves slots that a device drives. The carriers are tcp_pump.h, rdma_poster.h and, in port.c, that of
shared memory.
"""
