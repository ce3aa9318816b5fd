"""GGUF, the file format of llama.cpp: one file, or several, with the hyper-parameters, the tokenizer and the tensors of
a model.

    file     GGUFFile: the metadata and the tensors of mapped files; ModelSource: the files of a model, opened once

Tensors become parameters in `fastdecode/spart/checkpoints/gguf.py`; the tokenizer is made in
`fastdecode/text/gguf_tokenizer.py`.
"""

from __future__ import annotations
