/* The tokens that a row attends to in a layer that selects tokens (fd_selection_t). A row that sees no more tokens than
 * the layer selects attends to all of them. */
#pragma once

#include "item.h"

/* Whether a row of an entry sees more tokens than the layer attends to. */
static inline bool fd_row_selects(const call_t *c, const fd_entry_t *e, uint32_t row) {
    return c->shape->topk && n_seen(c, e, row) > c->shape->topk;
}

/* Appends the index key of a new row of an entry, in a layer with an indexer. */
void fd_append_index_key(call_t *c, const fd_entry_t *e, uint32_t row);
/* Goes on with the selection of the tokens of a row, from the cursor's page on. Returns false if the thread should
 * stop. */
bool fd_select_tokens(call_t *c, const fd_entry_t *e, uint32_t row);
/* Points the thread's chunks at memory with K of the tokens that a row has selected, one after another. */
void fd_gather_selected(call_t *c, const fd_entry_t *e, uint32_t row);
