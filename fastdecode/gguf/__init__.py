"""GGUF, the file format of llama.cpp: one file with the hyper-parameters, the tokenizer and the tensors of a model.

    source   ModelSource: a model's directory or GGUF file, opened once
    file     GGUFFile: the metadata and the table of tensors of a mapped file

Tensors become parameters in `fastdecode/spart/checkpoints/gguf.py`; the tokenizer is made in
`fastdecode/text/gguf_tokenizer.py`.
"""

from __future__ import annotations
