/* The ring's interface, beside requests.cdef.h. Read twice: by the C compiler through aio_ring.h, and by cffi, hence no
   preprocessor here. Each call that is made in another process than the one that opened the ring returns RING_FORKED. */

typedef struct aio_ring aio_ring;

/* Make a ring for `depth` requests at once. 0 or a negative errno; -EAGAIN: fs.aio-max-nr is used up. */
int aio_ring_open(unsigned depth, aio_ring **opened);

/* Take `count` requests, fewer where `depth` are outstanding; how many. They are offered to the kernel at once: what it refuses
   becomes a completion, what it has no room for is offered again by the next submit or reap. */
int aio_ring_submit(aio_ring *ring, const ring_request *requests, unsigned count);

/* Write up to `room` completions to `out`; how many. Waits up to `timeout_ns` for `at_least` of them (for all outstanding, if
   these are fewer). -EINTR: a signal came while waiting; nothing is lost, call again with the time that is left.
   Other negative errno: the kernel would not say; nothing is lost either. */
int aio_ring_reap(aio_ring *ring, unsigned at_least, int64_t timeout_ns, ring_completion *out, unsigned room);

/* An fd that polls readable when reap may have something. */
int aio_ring_fileno(aio_ring *ring);

/* Wait for everything in flight and free. In a forked child only memory is freed: the requests are the parent's. */
void aio_ring_close(aio_ring *ring);
