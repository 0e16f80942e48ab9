/* Loads the library named by the first argument and asks who defines the process's allocator,
 * before and after: it must be the C library both times. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static const char *const names[] = {"malloc",         "calloc", "realloc", "free",
                                    "posix_memalign", "_Znwm",  "_ZdlPv"};

static int owned_by_system(const char *when, const char *library) {
    size_t i;
    for (i = 0; i < sizeof names / sizeof names[0]; ++i) {
        Dl_info info;
        void *address = dlsym(RTLD_DEFAULT, names[i]);
        if (address == NULL) continue; /* operator new before a C++ library is loaded */
        if (dladdr(address, &info) == 0 || strstr(info.dli_fname, library) != NULL ||
            (strstr(info.dli_fname, "libc.so") == NULL &&
             strstr(info.dli_fname, "libstdc++.so") == NULL)) {
            fprintf(stderr, "%s: %s is defined by %s\n", when, names[i], info.dli_fname);
            return 0;
        }
    }
    return 1;
}

int main(int argc, char **argv) {
    void *library;
    if (argc != 2 || !owned_by_system("before", "libkvrt")) return 1;
    library = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    if (dlsym(library, "kvrt_version") == NULL) return 3;
    if (!owned_by_system("after", "libkvrt")) return 4;
    puts("malloc ok");
    return 0;
}
