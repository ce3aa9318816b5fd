"""The next tokens of a step.

sampling         Sampler: filters and draws the tokens of a step on a device
host_sampling    HostSampler: the same on a CPU, in C
sampling_kinds   which of the filters a step needs
results          what all samplers share: their limits, and how they report a row's token
draws            random draws by seed and index
prompt_logprobs  the probabilities of a prompt's own tokens
"""
