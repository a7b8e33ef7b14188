/* What a ring is asked for, and what it answers. Read by the C compiler and by cffi, hence no preprocessor here. */

/* Bytes to move between memory at `address` and `fd` at `offset`. */
typedef struct {
    int operation;
    int fd;
    int64_t offset;
    uint64_t address;
    uint64_t nbytes;
    int64_t tag;
} ring_request;

/* A request's end: bytes moved (fewer than asked for only at the end of the file), or a negative errno. */
typedef struct {
    int64_t tag;
    int64_t result;
} ring_completion;

enum {
    RING_READ = 0,
    RING_WRITE = 1
};

/* Returned by every call made in another process than the one that opened the ring. Beyond any errno (they end at 4095). */
enum {
    RING_FORKED = -4096
};
