/* Compares transports/verbs_abi.h with <infiniband/verbs.h>, which it replaces. It compiles only if they agree. */
#include <infiniband/verbs.h>

#include <stddef.h>

#include "transports/verbs_abi.h"

#define SAME_PLACE(ours, our_field, theirs, their_field)                                                               \
    _Static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field), #our_field " is elsewhere");            \
    _Static_assert(sizeof(((ours *)0)->our_field) == sizeof(((theirs *)0)->their_field), #our_field " has another "    \
                                                                                                    "size")
#define SAME(ours, theirs, field) SAME_PLACE(ours, field, theirs, field)

SAME(fd_ibv_sge_t, struct ibv_sge, addr);
SAME(fd_ibv_sge_t, struct ibv_sge, length);
SAME(fd_ibv_sge_t, struct ibv_sge, lkey);
_Static_assert(sizeof(fd_ibv_sge_t) == sizeof(struct ibv_sge), "sge");

SAME(fd_ibv_send_wr_t, struct ibv_send_wr, wr_id);
SAME(fd_ibv_send_wr_t, struct ibv_send_wr, next);
SAME(fd_ibv_send_wr_t, struct ibv_send_wr, sg_list);
SAME(fd_ibv_send_wr_t, struct ibv_send_wr, num_sge);
SAME(fd_ibv_send_wr_t, struct ibv_send_wr, opcode);
SAME(fd_ibv_send_wr_t, struct ibv_send_wr, send_flags);
SAME(fd_ibv_send_wr_t, struct ibv_send_wr, imm_data);
SAME_PLACE(fd_ibv_send_wr_t, remote_addr, struct ibv_send_wr, wr.rdma.remote_addr);
SAME_PLACE(fd_ibv_send_wr_t, rkey, struct ibv_send_wr, wr.rdma.rkey);
_Static_assert(sizeof(fd_ibv_send_wr_t) == sizeof(struct ibv_send_wr), "work request");

SAME(fd_ibv_wc_t, struct ibv_wc, wr_id);
SAME(fd_ibv_wc_t, struct ibv_wc, status);
SAME(fd_ibv_wc_t, struct ibv_wc, vendor_err);
SAME(fd_ibv_wc_t, struct ibv_wc, qp_num);
_Static_assert(sizeof(fd_ibv_wc_t) == sizeof(struct ibv_wc), "work completion");

SAME(fd_ibv_comp_channel_t, struct ibv_comp_channel, context);
SAME(fd_ibv_comp_channel_t, struct ibv_comp_channel, fd);
SAME(fd_ibv_cq_t, struct ibv_cq, context);
SAME(fd_ibv_cq_t, struct ibv_cq, channel);
SAME(fd_ibv_qp_t, struct ibv_qp, context);
SAME(fd_ibv_qp_t, struct ibv_qp, send_cq);
SAME(fd_ibv_qp_t, struct ibv_qp, recv_cq);
SAME(fd_ibv_qp_t, struct ibv_qp, qp_num);
SAME(fd_ibv_qp_t, struct ibv_qp, qp_type);
SAME_PLACE(fd_ibv_context_t, poll_cq, struct ibv_context, ops.poll_cq);
SAME_PLACE(fd_ibv_context_t, post_send, struct ibv_context, ops.post_send);
SAME(fd_ibv_context_t, struct ibv_context, cmd_fd);
SAME(fd_ibv_context_t, struct ibv_context, async_fd);

_Static_assert((int)FD_IBV_QPT_RC == (int)IBV_QPT_RC, "queue pair type");
_Static_assert((int)FD_IBV_WR_RDMA_WRITE == (int)IBV_WR_RDMA_WRITE, "opcode");
_Static_assert((int)FD_IBV_SEND_SIGNALED == (int)IBV_SEND_SIGNALED && (int)FD_IBV_SEND_INLINE == (int)IBV_SEND_INLINE,
               "flags");
_Static_assert((int)FD_IBV_WC_SUCCESS == (int)IBV_WC_SUCCESS && (int)FD_IBV_WC_LOC_LEN_ERR == (int)IBV_WC_LOC_LEN_ERR &&
                   (int)FD_IBV_WC_LOC_QP_OP_ERR == (int)IBV_WC_LOC_QP_OP_ERR &&
                   (int)FD_IBV_WC_LOC_PROT_ERR == (int)IBV_WC_LOC_PROT_ERR &&
                   (int)FD_IBV_WC_WR_FLUSH_ERR == (int)IBV_WC_WR_FLUSH_ERR &&
                   (int)FD_IBV_WC_REM_INV_REQ_ERR == (int)IBV_WC_REM_INV_REQ_ERR &&
                   (int)FD_IBV_WC_REM_ACCESS_ERR == (int)IBV_WC_REM_ACCESS_ERR &&
                   (int)FD_IBV_WC_REM_OP_ERR == (int)IBV_WC_REM_OP_ERR &&
                   (int)FD_IBV_WC_RETRY_EXC_ERR == (int)IBV_WC_RETRY_EXC_ERR &&
                   (int)FD_IBV_WC_RNR_RETRY_EXC_ERR == (int)IBV_WC_RNR_RETRY_EXC_ERR &&
                   (int)FD_IBV_WC_FATAL_ERR == (int)IBV_WC_FATAL_ERR,
               "completion status");
