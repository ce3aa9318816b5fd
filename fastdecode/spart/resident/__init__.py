"""Resident KV: KV pages in the memory of the S-Part's own device, whose rows cross no link.

link     ResidentLink: the pages as one more place for sequences, beside the R-nodes
arena    PageArena: the pages' memory, and the lists of the pages that sequences hold
layers   attention_layers: what the layers of a link ask of the kernels
kernels  ResidentKernels: the kernels that read and write the pages of all layers
rows     ResidentRows: the rows of a step that attend to these pages, or are appended to them
trial    a trial of the kernels on this device, before they serve
"""
