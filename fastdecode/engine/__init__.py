"""The engine: the S-node's asyncio part between the API and the S-Part.

request        what the API hands in and gets back, and the errors
engine         Engine: takes requests, drives the steps, fills the token streams
stream         RequestStream: the tokens of one request
sequence       Sequence: one request's state
scheduler      what goes into the next step; preemption
cluster        placement of sequences on R-nodes, the prefix cache
ledger         RNodeLedger: the account of one R-node's pages and load
prefixes       PrefixIndex: the cached prefixes of one R-node
batching       a plan in the S-Part's terms
runner         the thread in which the S-Part computes
moves          running sequences from one R-node to another
rebalance      which of them move because steps wait for their R-node
rnode_control  FREE, FORK and STATS; what happens when an R-node is lost
stats          counters for /metrics and /health
"""
