/* samples/minimal/minimal.c as a function, so that every build runs it. */
#define main minimal_main
#include "../../samples/minimal/minimal.c"
