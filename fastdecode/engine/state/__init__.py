"""What the engine knows of requests, sequences and R-nodes. Bookkeeping: no IO, no clocks.

request      what the API hands in and gets back, and the errors
constraints  the tokens that a request allows next
sequence     Sequence: one request's state
guesser      the guesses of one sequence's next tokens
pages        the pages of a lease, each counted once
prefixes     PrefixIndex: the cached prefixes of one R-node
states       StateSlots: the slots of sequences and snapshots in the memory for states
ledger       RNodeLedger: the account of one R-node's pages and load
bandwidth    how fast an R-node reads KV-cache
totals       Totals: the counters of an engine
"""
