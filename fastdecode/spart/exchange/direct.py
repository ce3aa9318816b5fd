"""Direct: the exchange of an S-Part on a CPU."""

from __future__ import annotations

import torch

from fastdecode.spart.exchange.base import Exchange, LinkRows, RowTensors, buffers, row_counts


class Direct(Exchange):
    """In a step that uses one R-node, `q`, `kv` and `o` are the slot itself, and nothing is copied. In a step of
    several R-nodes they are memory of their own, and the C call that rings a layer copies the rows to the slots."""

    def __init__(self, slot: int, link_rows: list[LinkRows]):
        n_attend, n_rows = row_counts(link_rows)
        if sum(len(rows.views.link.members) for rows in link_rows) == 1:
            views = link_rows[0].views
            self.q, self.kv, self.o = views.q[:n_rows], views.kv[:n_rows], views.o[:n_rows]
            super().__init__(slot, link_rows)
        else:
            self.q, self.kv, self.o = buffers(link_rows, torch.device("cpu"))
            super().__init__(slot, link_rows, RowTensors(self.q[:n_attend], self.kv, self.o[:n_attend]))
