"""The native decoder: a step of one mini-batch through all layers of a model.

decoder     SPart: a step, a generator that yields while the R-nodes attend
step_rows   StepRows: the rows of a step, from its chunks
layer_pass  DecoderLayers and DecoderPass: the layers, and the pass of a step through them
weights     Model: configuration and parameters
blueprint   Blueprint: which tensors of a checkpoint make up which parameter
rope        rotary position embedding
experts     a layer's experts in place of its MLP
block_ops   BlockOps: the operations between products, in torch or in C
cuda_ops    CudaBlockOps: these operations by kernels of ours on a GPU
joints      LayerJoints: what lies between the attentions of two layers, in one C call
rank_steps  the steps of a tensor-parallel S-Part, which rank 0 schedules
timeline    the times at which the S-Part computed and waited, for the page of the cluster
"""
