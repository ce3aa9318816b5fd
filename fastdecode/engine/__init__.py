"""The engine: the S-node's asyncio part between the API and the S-Part.

engine         Engine: takes requests, drives the steps, hands out their tokens
intake         Intake: makes the sequences of requests
delivery       the tokens of a step on their way to the API
checks         checks of requests and of links
step_batch     step_batch: a plan in the S-Part's terms
runner         the thread in which the S-Part computes
rnode_control  FREE, FORK, RESIZE and STATS; what happens when an R-node is lost
stats          what /metrics and /health show
state/         requests, sequences, pages, leases and prefixes
scheduling/    what goes into the next step, and on which R-node a sequence is cached
migration/     running sequences that migrate between R-nodes; disaggregated prefill

The folders import in this order: state, scheduling, migration, engine.
"""
