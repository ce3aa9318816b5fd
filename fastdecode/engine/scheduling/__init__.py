"""The parts that the scheduler (engine/scheduler.py) puts together. Bookkeeping and arithmetic: no IO, no clocks.

plan        a step as the scheduler plans it, and the bounds on it
queue       WaitingQueue: who may start next, and how often somebody may be passed over
admission   greedy, and the load-stabilising schedule
lengths     how long outputs will be
fairness    what clients that wait at the same time were served
placement   on which R-node a waiting sequence may run
balance     mini-batches of equal steps
rtime       the predicted time of the R-Part
step_time   how long steps take, and the chunks of prompts that keep a target time
budgets     what a step's prompts may cost: rows, attention work, staged keys and values
"""
