"""C for CPUs, and CUDA kernels. `_native` is the one CPython module over the C.

attention  append K and V to chunks of KV pages and attend to them, for each ISA (attention.h); the read roofline
cache      the arena of a lease and the page lists of its sequences (kvcache.h)
engine     the R-engine (engine.h): the words of a slot (slots.h), the plan of a step (plan.h), the work on it (work.h),
           which threads share in jobs (jobs.h), in the order of turns.h
linears    the S-Part's products with weights of 4, 8 and 16 bits
decoder    the S-Part's other work on rows: norms, RoPE, prompts' attention, joints, states, sums over ranks
sampling   the next tokens, from logits
cpu        vectors and half precision for each ISA, its choice at run time, and the S-Part's threads
gpu        CUDA kernels for pages in a GPU's memory, how they are compiled, and the CUDA driver for C
py         the types of `_native`
"""
