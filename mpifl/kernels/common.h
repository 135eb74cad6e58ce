/* What both kernel libraries export about themselves. Included once by each. */
#ifdef __FAST_MATH__
#error "-ffast-math reorders sums: build without it"
#endif
#ifndef BUILD
#define BUILD "" /* hash of the sources and compiler flags, defined by setup.py */
#endif

/* Version of the exported signatures. Increase it with every change of an argument; bindings.VERSION must be equal. */
int mpifl_version(void) { return 7; }

/* Hash of the sources, compiler flags and compiler: "HASH|FLAGS|COMPILER". */
const char *mpifl_build(void) { return BUILD "|" __VERSION__; }
