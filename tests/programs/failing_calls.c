/* Fails the system calls that change files with the error in the first byte of the file FAILING_CALLS, if that is not 0. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>

static volatile unsigned char *error_code;

__attribute__((constructor)) static void map_file(void) {
  const char *path = getenv("FAILING_CALLS");
  int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
  int handle = path ? real(path, O_RDONLY) : -1;
  void *mapped = handle < 0 ? MAP_FAILED : mmap(0, 1, PROT_READ, MAP_SHARED, handle, 0);
  error_code = mapped == MAP_FAILED ? 0 : mapped;
}

static int fails(void) {
  if (!error_code || !*error_code) return 0;
  errno = *error_code;
  return 1;
}

#define CALL(result, name, parameters, arguments)                 \
  result name parameters {                                        \
    result(*real) parameters = dlsym(RTLD_NEXT, #name);           \
    return fails() ? -1 : real arguments;                         \
  }

CALL(ssize_t, write, (int a, const void *b, size_t c), (a, b, c))
CALL(ssize_t, writev, (int a, const struct iovec *b, int c), (a, b, c))
CALL(ssize_t, pwrite64, (int a, const void *b, size_t c, off64_t d), (a, b, c, d))
CALL(int, fsync, (int a), (a))
CALL(int, mkdir, (const char *a, mode_t b), (a, b))
CALL(int, link, (const char *a, const char *b), (a, b))
CALL(int, linkat, (int a, const char *b, int c, const char *d, int e), (a, b, c, d, e))
CALL(int, rename, (const char *a, const char *b), (a, b))

#define OPEN(name)                                                \
  int name(const char *path, int flags, ...) {                    \
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, #name);\
    va_list rest;                                                 \
    va_start(rest, flags);                                        \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest);                                                 \
    return (flags & O_CREAT) && fails() ? -1 : real(path, flags, mode); \
  }

OPEN(open)
OPEN(open64)
