"""KV pages on their way between R-nodes, and from the S-Part's device to them.

migrator        migrates running sequences from one R-node to another
rebalance       which of them migrate because steps wait for their R-node
spiller         cuts sequences on the S-Part's device, whose oldest pages go to R-nodes
adopter         lets streams of other S-nodes go on with the K and V that they have on R-nodes
prefill_client  asks a prefill S-node to compute a prompt whose pages it migrates here
prefill_worker  computes prompts for other S-nodes and migrates their pages
"""
