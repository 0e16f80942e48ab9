/* What kvrt.h declares, as the C compiler sees it: every struct, field and constant, each listed by
 * hand in tables.c or constants.c. golden_test.cpp checks that nothing of the header is missing. */
#ifndef KVRT_TESTS_ABI_TABLES_H
#define KVRT_TESTS_ABI_TABLES_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct abi_struct {
    const char* name;
    size_t size;
    size_t alignment;
};

struct abi_field {
    const char* owner;
    const char* name;
    size_t offset;
    size_t size;
};

struct abi_constant {
    const char* name;
    int64_t value;
};

extern const struct abi_struct abi_structs[];
extern const size_t abi_struct_count;
extern const struct abi_field abi_fields[];
extern const size_t abi_field_count;
extern const struct abi_constant abi_constants[];
extern const size_t abi_constant_count;

#ifdef __cplusplus
}
#endif

#endif
