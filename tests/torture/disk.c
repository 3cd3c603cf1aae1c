/* Preloaded: a disk that is full. From the Nth write on, or at the Nth alone, or once it has taken so many bytes, it
   refuses; or the process is killed in the middle of its Nth write. Counted are writes to files on their way to becoming
   whole (*.memcorr-tmp), or, if a folder is given, to all files below it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static long room = -1, at = -1, once, deadly, writes;
static char below[4096];

void disk(long bytes, long nth, long alone) { room = bytes; at = nth; once = alone; deadly = 0; writes = 0; }
void disk_below(const char *folder, long kills) { snprintf(below, sizeof below, "%s", folder); deadly = kills; }
long written(void) { return writes; }

__attribute__((constructor)) static void begin(void) {
    if (getenv("DISK_BYTES")) room = atol(getenv("DISK_BYTES"));
    if (getenv("DISK_WRITE")) at = atol(getenv("DISK_WRITE")), once = 1;
}

static int counted(int fd) {
    char link[64], name[4096], end[] = ".memcorr-tmp";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, name, sizeof name - 1), k = sizeof end - 1;
    if (n < 0) return 0;
    name[n] = 0;
    if (*below) return !strncmp(name, below, strlen(below));
    return n >= k && !memcmp(name + n - k, end, k);
}

/* How many of the bytes are taken; -1 if none is. */
static ssize_t taken(int fd, size_t wanted) {
    if (!counted(fd)) return wanted;
    writes++;
    if (at >= 0 && (once ? writes == at : writes >= at)) return -1;
    if (room < 0) return wanted;
    if (room == 0) return -1;
    if (wanted > (size_t)room) wanted = room;
    room -= wanted;
    return wanted;
}

#define REAL(kind, name) ((kind)dlsym(RTLD_NEXT, name))
#define HALF(call) if (size < 0 && deadly) { if (n > 1) { size = n / 2; if (call < 0) {} } raise(SIGKILL); }
#define PASS(call) ssize_t size = taken(fd, n); HALF(call) if (size < 0) { errno = ENOSPC; return -1; } return call

ssize_t write(int fd, const void *b, size_t n) { PASS(REAL(ssize_t (*)(int, const void *, size_t), "write")(fd, b, size)); }
ssize_t pwrite(int fd, const void *b, size_t n, off_t o) {
    PASS(REAL(ssize_t (*)(int, const void *, size_t, off_t), "pwrite")(fd, b, size, o));
}
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t o) {
    PASS(REAL(ssize_t (*)(int, const void *, size_t, off64_t), "pwrite64")(fd, b, size, o));
}
/* All of it or nothing. */
ssize_t writev(int fd, const struct iovec *b, int count) {
    size_t n = 1;
    ssize_t size = taken(fd, n);
    if (size < 0 && deadly) raise(SIGKILL);
    if (size <= 0) { errno = ENOSPC; return -1; }
    return REAL(ssize_t (*)(int, const struct iovec *, int), "writev")(fd, b, count);
}
/* Some disks refuse only when they are asked to make sure. */
int fsync(int fd) {
    if (*below && taken(fd, 1) < 0) {
        if (deadly) raise(SIGKILL);
        errno = ENOSPC;
        return -1;
    }
    return REAL(int (*)(int), "fsync")(fd);
}
