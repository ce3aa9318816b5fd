"""What goes into the next step, and on which R-node a sequence is cached. Bookkeeping and arithmetic: no IO, no clocks.

options          EngineOptions: what the owner of an engine chooses
scheduler        Scheduler: puts the other modules together
cluster          Cluster: all R-nodes, the sequences on them, their pages, the prefix cache
plan             Plan: a step as the scheduler plans it; and the bounds on it
chunks           ChunkPlanner: the tokens of each sequence in a step
queue            WaitingQueue: sequences that may start next, and how often one may be passed over
admission        greedy, and the load-stabilising schedule
lengths          estimates of the lengths of outputs
fairness         fair shares of clients that wait at the same time
placement        Placer: the R-node of a waiting sequence
even_out         mini-batches of equal steps
way_choice       WayChoice: how sequences on the S-Part's GPU and sequences on R-nodes decode together
ways             the three ways of that, and the tokens a second that each brings
rtime            the predicted time of the R-Part
s_part_forecast  the predicted time of the S-Part, by its rows
step_time        how long steps take, and the chunks of prompts that keep a target time
spread           how much longer slow steps take than predicted
running          Running: the running sequences, and their ways in and out
pauses           which running sequences pause for others, and whose pages they get
pace             which sequences may start to decode, and which choices pause, so that steps keep the target time
speculation      how many tokens to guess for each sequence of a step
deadline         how long an R-node may take for a layer
line             a straight line fitted to observations
budgets          bounds on a step's prompts: rows, attention work, staged keys and values
"""
