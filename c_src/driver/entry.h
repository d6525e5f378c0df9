/* What the driver offers to the ABI layer. All return a status of abi/status.def. */
#ifndef PF_DRIVER_ENTRY_H
#define PF_DRIVER_ENTRY_H

#include "../abi/pyflash_abi.h"

enum pf_status {
#define PF_STATUS(name, code, text) PF_STATUS_##name = code,
#include "../abi/status.def"
#undef PF_STATUS
};

int pf_driver_attention(const pf_attention_call *call);
/* The call as it is to be made, if it fits what is known of it. */
int pf_driver_attention_again(const pf_known_call *known, const pf_attention_call *call);
int pf_driver_plan(const pf_attention_call *call, pf_plan *plan);
int pf_driver_merge(const pf_merge_call *call);
int pf_driver_append(const pf_append_call *call);
int pf_driver_stats(const pf_stats_call *call);

#endif
