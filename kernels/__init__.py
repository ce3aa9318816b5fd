"""C attention, the KV-cache and the R-engine; `_native` is the one CPython module over them."""
