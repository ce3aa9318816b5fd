"""KV pages on their way between R-nodes, and from the S-Part's device to them.

migrator        migrates running sequences from one R-node to another
rebalance       which of them migrate because steps wait for their R-node
prefix_moves    PrefixMoves: idle prefixes move to R-nodes before running sequences spill, and come back
spiller         when the oldest pages of sequences on the S-Part's device go to R-nodes, and come back
cut_moves       moves of the page border that divides a sequence between the device and an R-node
page_copies     copies of pages between the device and R-nodes
adopter         lets streams of other S-nodes go on with the K and V that they have on R-nodes
prefill_client  asks a prefill S-node to compute a prompt whose pages it migrates here
callbacks       what these modules ask of the engine
prefill_worker  computes prompts for other S-nodes and migrates their pages
"""
