/* Programs that documents show or samples are, as functions. */
#ifndef KVRT_TESTS_ABI_README_EXAMPLE_H
#define KVRT_TESTS_ABI_README_EXAMPLE_H

#include "kvrt/kvrt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One decode token a hundred times: k and v are [2, 64], q and o [8, 64]. 0 when all went well. */
int readme_example(float *k, float *v, float *q, float *o);

/* samples/minimal/minimal.c */
int minimal_main(void);

#ifdef __cplusplus
}
#endif

#endif
