#include "select.h"

#include <string.h>

#include "chunk.h"

enum {
    DIGIT_BITS = 11, /* of the digits that the selection counts; their counts stay in L1 */
    TOKENS_AHEAD = 8 /* whose K is prefetched */
};

/* A number that is larger for a larger score. */
static inline uint32_t rank_of(float score) {
    const uint32_t bits = fd_float_bits(score);
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

/* Radix selection: each pass counts a digit of the scores that agree with the border's higher digits. */
void fd_select_top(const float *scores, uint32_t n, uint32_t k, uint32_t *which) {
    uint32_t border = 0, mask = 0, wanted = k, found = 0;
    for (int shift = 32; k && shift > 0;) {
        const int bits = shift < DIGIT_BITS ? shift : DIGIT_BITS;
        uint32_t counts[1 << DIGIT_BITS] = {0}, digit = (1u << bits) - 1;
        shift -= bits;
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t rank = rank_of(scores[i]);
            counts[rank >> shift & ((1u << bits) - 1)] += (rank & mask) == border;
        }
        while (wanted > counts[digit]) wanted -= counts[digit--];
        border |= digit << shift, mask |= ((1u << bits) - 1) << shift;
        if (wanted == counts[digit]) break; /* all scores of this digit are selected */
    }
    for (uint32_t i = 0; i < n && found < k; i++) {
        const uint32_t rank = rank_of(scores[i]) & mask;
        if (rank < border || (rank == border && !wanted)) continue;
        wanted -= rank == border;
        which[found++] = i;
    }
}

/* Where K of a token begins in a chunk whose columns are `depth` words deep. */
static const uint8_t *k_of(fd_kv_dtype_t format, uint32_t depth, const uint8_t *chunk, uint32_t token) {
    return chunk + fd_lane_offset(format, depth, token % FD_PAGE_TOKENS);
}

void fd_gather_k(fd_kv_dtype_t dtype, uint32_t head_size, const uint8_t *const *chunks, const uint32_t *tokens,
                 uint32_t n, uint8_t *to) {
    const fd_kv_dtype_t format = fd_k_format(dtype);
    const uint32_t depth = fd_k_depth(format, head_size);
    const size_t row = FD_COLUMN_LANES * fd_word_bytes(format), chunk_bytes = fd_chunk_end(dtype, head_size, 0, 1);
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *from = k_of(format, depth, chunks[i], tokens[i]);
        uint8_t *k = to + i / FD_PAGE_TOKENS * chunk_bytes + fd_lane_offset(format, depth, i % FD_PAGE_TOKENS);
        if (i + TOKENS_AHEAD < n) {
            const uint8_t *ahead = k_of(format, depth, chunks[i + TOKENS_AHEAD], tokens[i + TOKENS_AHEAD]);
            for (uint32_t word = 0; word < depth; word++) __builtin_prefetch(ahead + word * row);
        }
        if (fd_word_bytes(format) == sizeof(uint16_t))
            for (uint32_t word = 0; word < depth; word++) memcpy(k + word * row, from + word * row, sizeof(uint16_t));
        else
            for (uint32_t word = 0; word < depth; word++) memcpy(k + word * row, from + word * row, sizeof(uint32_t));
    }
}
