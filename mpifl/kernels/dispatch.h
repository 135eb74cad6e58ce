/* Selects the instruction set of libraries that are compiled once for each set. Included once by each library. */
enum { NO_VECTORS, NARROW_VECTORS, WIDE_VECTORS };

#define UNROLL(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)

/* Keeps a product from becoming part of a fused multiply-add. */
#ifdef __x86_64__
#define ROUNDED(v) __asm__("" : "+x"(v))
#elif defined(__aarch64__)
#define ROUNDED(v) __asm__("" : "+w"(v))
#endif

static int narrow_only;

/* Selects the narrower vectors of a processor that has two widths (on != 0), or the widest; for tests. */
void mpifl_use_narrow_vectors(int on) { narrow_only = on; }

#ifdef __x86_64__
#define TARGET_AVX512 __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")))
#define TARGET_AVX2 __attribute__((target("avx2,fma")))

static inline int vectors(void)
{
    if (!narrow_only && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq"))
        return WIDE_VECTORS;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? NARROW_VECTORS : NO_VECTORS;
}
#elif defined(__aarch64__)
static inline int vectors(void) { return NARROW_VECTORS; }
#else
static inline int vectors(void) { return NO_VECTORS; }
#endif

/* Returns whether this processor has fused multiply-add, on which the bits of the results depend. */
int mpifl_supported(void) { return vectors() != NO_VECTORS; }
