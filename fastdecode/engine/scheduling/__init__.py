"""What goes into the next step, and on which R-node a sequence is cached. Bookkeeping and arithmetic: no IO, no clocks.

scheduler   Scheduler: puts the other modules together
cluster     all R-nodes: the sequences on them, their pages, the prefix cache
plan        a step as the scheduler plans it, and the bounds on it
queue       WaitingQueue: sequences that may start next, and how often one may be passed over
admission   greedy, and the load-stabilising schedule
lengths     estimates of the lengths of outputs
fairness    fair shares of clients that wait at the same time
placement   the R-node of a waiting sequence
even_out    mini-batches of equal steps
rtime       the predicted time of the R-Part
step_time   how long steps take, and the chunks of prompts that keep a target time
running     the running sequences, and their ways in and out
pauses      which running sequences pause for others, and whose pages they get
pace        who may start to decode, and which choices pause, so that steps keep the target time
speculation how many tokens to guess for each sequence of a step
deadline    how long an R-node may take for a layer
line        a straight line fitted to observations
budgets     bounds on a step's prompts: rows, attention work, staged keys and values
"""
