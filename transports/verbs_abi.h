/* The part of libibverbs' binary interface that posting and polling need.
 *
 * libibverbs exports no function for either: ibv_post_send and ibv_poll_cq are inline functions of <infiniband/verbs.h>
 * that call through the function table in a device's context. Every verbs program is compiled against that table and
 * these structures (IBVERBS_1.1, libibverbs.so.1 of rdma-core), so they do not change. This file repeats the fields
 * that fastdecode uses, so that it builds without the headers of libibverbs. tests/c/verbs_abi.c compares them with the
 * headers where those are installed.
 */
#pragma once

#include <stdint.h>

enum { FD_IBV_QPT_RC = 2 };
enum { FD_IBV_WR_RDMA_WRITE = 0 };
enum { FD_IBV_SEND_SIGNALED = 1 << 1, FD_IBV_SEND_INLINE = 1 << 3 };
enum {
    FD_IBV_WC_SUCCESS = 0,
    FD_IBV_WC_LOC_LEN_ERR = 1,
    FD_IBV_WC_LOC_QP_OP_ERR = 2,
    FD_IBV_WC_LOC_PROT_ERR = 4,
    FD_IBV_WC_WR_FLUSH_ERR = 5,
    FD_IBV_WC_REM_INV_REQ_ERR = 9,
    FD_IBV_WC_REM_ACCESS_ERR = 10,
    FD_IBV_WC_REM_OP_ERR = 11,
    FD_IBV_WC_RETRY_EXC_ERR = 12,
    FD_IBV_WC_RNR_RETRY_EXC_ERR = 13,
    FD_IBV_WC_FATAL_ERR = 19,
};

typedef struct fd_ibv_context fd_ibv_context_t;
typedef struct fd_ibv_cq fd_ibv_cq_t;
typedef struct fd_ibv_qp fd_ibv_qp_t;

typedef struct {
    uint64_t addr;
    uint32_t length;
    uint32_t lkey;
} fd_ibv_sge_t;

typedef struct fd_ibv_send_wr {
    uint64_t wr_id;
    struct fd_ibv_send_wr *next;
    fd_ibv_sge_t *sg_list;
    int num_sge;
    int opcode;
    unsigned int send_flags;
    uint32_t imm_data;
    uint64_t remote_addr; /* wr.rdma of the union `wr` */
    uint32_t rkey;
    uint32_t unused[19]; /* fields of other opcodes */
} fd_ibv_send_wr_t;

typedef struct {
    uint64_t wr_id;
    int status;
    int opcode;
    uint32_t vendor_err;
    uint32_t byte_len;
    uint32_t imm_data;
    uint32_t qp_num;
    uint32_t src_qp;
    unsigned int wc_flags;
    uint16_t pkey_index;
    uint16_t slid;
    uint8_t sl;
    uint8_t dlid_path_bits;
} fd_ibv_wc_t;

typedef struct {
    fd_ibv_context_t *context;
    int fd;
    int refcnt;
} fd_ibv_comp_channel_t;

/* The first fields of three longer structures. */
struct fd_ibv_cq {
    fd_ibv_context_t *context;
    fd_ibv_comp_channel_t *channel;
};

struct fd_ibv_qp {
    fd_ibv_context_t *context;
    void *qp_context;
    void *pd;
    fd_ibv_cq_t *send_cq;
    fd_ibv_cq_t *recv_cq;
    void *srq;
    uint32_t handle;
    uint32_t qp_num;
    int state;
    int qp_type;
};

struct fd_ibv_context {
    void *device;
    void *ops_before_poll_cq[11];
    int (*poll_cq)(fd_ibv_cq_t *cq, int n, fd_ibv_wc_t *wc); /* returns the completions taken, or < 0 */
    void *ops_before_post_send[13];
    int (*post_send)(fd_ibv_qp_t *qp, fd_ibv_send_wr_t *wr, fd_ibv_send_wr_t **bad); /* returns 0 or an errno */
    void *ops_after_post_send[6];
    int cmd_fd;
    int async_fd;
};
