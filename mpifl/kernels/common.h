/* What all kernel libraries export about themselves. Included once by each. */
#ifdef __FAST_MATH__
#error "-ffast-math reorders sums: build without it"
#endif
#ifndef BUILD
#define BUILD "" /* hash of the sources and compiler flags, defined by setup.py */
#endif

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Returns the largest absolute value of x [count], or NaN if x contains one. Without the sign bit, floats have the same
 * order as their bits. */
static inline float largest_abs(const float *restrict x, ptrdiff_t count)
{
    int32_t largest = 0;
    float value;
    for (ptrdiff_t i = 0; i < count; i++) {
        int32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    memcpy(&value, &largest, sizeof value);
    return value;
}

/* Version of the exported signatures. Increase it with every change of an argument; bindings.VERSION must be equal. */
int mpifl_version(void) { return 10; }

/* Hash of the sources, compiler flags and compiler: "HASH|FLAGS|COMPILER". */
const char *mpifl_build(void) { return BUILD "|" __VERSION__; }
