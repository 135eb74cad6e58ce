/* Takes the functions of libm in their first versions, which every GNU C library has, so that a library built here runs where an
 * older one is installed. They return the same numbers as the later ones, which differ in errno. setup.py includes this file. */
#include <features.h>
#ifdef __GLIBC__
#ifdef __x86_64__
#define FIRST "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define FIRST "GLIBC_2.17"
#endif
#endif
#ifdef FIRST
__asm__(".symver exp,exp@" FIRST);
__asm__(".symver log,log@" FIRST);
#endif
