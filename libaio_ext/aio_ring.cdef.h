/* The ring's interface. Read twice: by the C compiler through aio_ring.h, and by cffi, hence no preprocessor here. */

typedef struct aio_ring aio_ring;

/* A request's end: bytes moved (fewer than asked for only at the end of the file), or a negative errno. */
typedef struct {
    int64_t tag;
    int64_t result;
} aio_ring_completion;

enum {
    AIO_RING_READ = 0,
    AIO_RING_WRITE = 1
};

/* Returned by every call made in another process than the one that opened the ring. Beyond any errno (they end at 4095). */
enum {
    AIO_RING_FORKED = -4096
};

/* Make a ring for `depth` requests at once. 0 or a negative errno; -EAGAIN: fs.aio-max-nr is used up. */
int aio_ring_open(unsigned depth, aio_ring **opened);

/* Set a request aside for the next commit. 1: taken; 0: `depth` requests are outstanding, reap first. */
int aio_ring_queue(aio_ring *ring, int operation, int fd, int64_t offset, uint64_t address, uint64_t nbytes, int64_t tag);

/* Offer everything queued to the kernel. 0. What it refuses becomes a completion, what it has no room for is offered again
   by the next commit or reap. */
int aio_ring_commit(aio_ring *ring);

/* Write up to `room` completions to `out`; how many. Waits up to `timeout_ns` for `at_least` of them (for all outstanding, if
   these are fewer). -EINTR: a signal came while waiting; nothing is lost, call again with the time that is left.
   Other negative errno: the kernel would not say; nothing is lost either. */
int aio_ring_reap(aio_ring *ring, unsigned at_least, int64_t timeout_ns, aio_ring_completion *out, unsigned room);

/* An fd that polls readable when reap may have something. */
int aio_ring_fileno(aio_ring *ring);

/* Wait for everything in flight and free. In a forked child only memory is freed: the requests are the parent's. */
void aio_ring_close(aio_ring *ring);
