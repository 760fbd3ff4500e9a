// A layer under every program that it is preloaded into: at the n-th change to files below a folder, whether it comes
// from Python or from Rust, the process is killed or the system call fails; or a signal comes after some CPU time, which
// unlike time itself does not depend on what else the machine does.

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>

static char folder[PATH_MAX];
static std::atomic<long> seen{0};
static long at = 0;
static int failure = 0;       // errno; 0 kills the process
static bool lasting = false;  // as a full disk is: every later change fails, too
static int number = SIGKILL;

static void strike(int) { kill(getpid(), number); }

// Counts and fails changes below `path` from now on; n = 0 only counts, seconds = 0 sends no signal.
extern "C" void faults_arm(const char* path, long n, int error, bool lasts, double seconds, int sent) {
    strncpy(folder, path, sizeof folder - 1);
    at = n, failure = error, lasting = lasts, number = sent, seen = 0;
    itimerval after{{0, 0}, {time_t(seconds), suseconds_t((seconds - time_t(seconds)) * 1e6)}};
    signal(SIGPROF, strike);
    setitimer(ITIMER_PROF, &after, nullptr);
}

extern "C" long faults_seen() { return seen; }

template <typename F> static F real(const char* name) { return reinterpret_cast<F>(dlsym(RTLD_NEXT, name)); }

// Returns true if this change is to fail. Death is the caller's, since a write gets half of its bytes out before.
static bool fails(const char* path) {
    if (strncmp(path, folder, strlen(folder))) return false;
    long now = ++seen;
    return at && (now == at || (lasting && now > at));
}

static bool fails_in(int descriptor, const char* name) {
    if (!folder[0]) return false;
    if (name && name[0] == '/') return fails(name);
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(descriptor == AT_FDCWD ? "/proc/self/cwd" : link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    return fails(path);
}

static int fail() {
    if (!failure) kill(getpid(), SIGKILL);
    errno = failure;
    return -1;
}

#define CHANGE(name, parameters, arguments, descriptor, path)                         \
    extern "C" int name parameters {                                                  \
        return fails_in(descriptor, path) ? fail() : real<int(*) parameters>(#name) arguments; \
    }
CHANGE(fsync, (int file), (file), file, nullptr)
CHANGE(ftruncate64, (int file, off64_t size), (file, size), file, nullptr)
CHANGE(mkdir, (const char* path, mode_t mode), (path, mode), AT_FDCWD, path)
CHANGE(chmod, (const char* path, mode_t mode), (path, mode), AT_FDCWD, path)
CHANGE(unlink, (const char* path), (path), AT_FDCWD, path)
CHANGE(rmdir, (const char* path), (path), AT_FDCWD, path)
CHANGE(unlinkat, (int folder, const char* path, int flags), (folder, path, flags), folder, path)
CHANGE(rename, (const char* from, const char* to), (from, to), AT_FDCWD, to)

#define OPEN(name)                                                                            \
    extern "C" int name(const char* path, int flags, ...) {                                   \
        va_list rest;                                                                         \
        va_start(rest, flags);                                                                \
        mode_t mode = va_arg(rest, mode_t);                                                   \
        va_end(rest);                                                                         \
        bool changes = flags & (O_WRONLY | O_RDWR | O_CREAT);                                 \
        if (changes && fails_in(AT_FDCWD, path)) return fail();                               \
        return real<int (*)(const char*, int, ...)>(#name)(path, flags, mode);                \
    }
OPEN(open)
OPEN(open64)

extern "C" ssize_t write(int file, const void* bytes, size_t count) {
    static auto next = real<ssize_t (*)(int, const void*, size_t)>("write");
    if (!fails_in(file, nullptr)) return next(file, bytes, count);
    if (!failure || (lasting && seen == at)) {
        ssize_t half = next(file, bytes, count / 2);
        if (failure && half) return half;
    }
    return fail();
}

extern "C" ssize_t writev(int file, const iovec* parts, int count) {
    return fails_in(file, nullptr) ? fail() : real<ssize_t (*)(int, const iovec*, int)>("writev")(file, parts, count);
}
