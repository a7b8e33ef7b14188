/* The interface of the disk link. Read twice: by the C compiler through disk_link.h, and by cffi, hence no preprocessor here. */

typedef struct disk_link disk_link;

/* A ring, which moves blocks: `submit` takes requests from the front and returns how many; `reap` is as aio_ring_reap. Either
   may return a negative errno, or RING_FORKED. `now` returns nanoseconds of a clock that never goes back; NULL: the system's. */
typedef struct {
    void *ring;
    int (*submit)(void *ring, const ring_request *requests, unsigned count);
    int (*reap)(void *ring, unsigned at_least, int64_t timeout_ns, ring_completion *out, unsigned room);
    int64_t (*now)(void);
} disk_ring;

/* As DiskConfig has them, in bytes; `depth` requests are in flight at most, `latency` is in nanoseconds. */
typedef struct {
    uint64_t depth, alignment, block, flight, window, piece;
    int64_t latency;
    unsigned char uuid[16];
} disk_config;

/* Where a part of a striped slot begins. */
typedef struct {
    int64_t fd;
    int64_t offset;
} disk_part;

/* A transfer, as many bytes as `nbytes` rounded up to the alignment. `way` is RING_READ or RING_WRITE, urgency 0 the highest.
   `expected`: the digests of the pieces that are read, or 0. `parts`: an array of `files` places of a striped slot, or 0.
   What is pointed to must stay until the transfer has ended. */
typedef struct {
    int64_t tag;
    int32_t way, urgency;
    int64_t fd, offset;
    uint64_t address, nbytes, tensor_id, generation, begin;
    uint64_t expected, parts, files;
} disk_transfer;

enum {
    DISK_DONE = 0,
    DISK_FAILED = 1,
    DISK_CORRUPT = 2
};

/* The end of a transfer. DISK_FAILED: the block of `size` bytes at byte `at` came back with `result`. DISK_CORRUPT: the piece at
   byte `at` has another digest. `digests` is the address of those of the `pieces` that were written, until the next turn. */
typedef struct {
    int64_t tag;
    int64_t outcome;
    int64_t result;
    uint64_t at, size;
    uint64_t pieces, digests;
} disk_end;

/* NULL: no memory. */
disk_link *disk_link_open(const disk_ring *ring, const disk_config *config);

/* Take `count` transfers, submit, reap and verify; write up to `room` ends to `out`, and return how many. Where there is none
   and nothing more to do at once, wait up to `timeout_ns` for one. -EINTR: a signal came while waiting; call again with the time
   that is left. Another negative errno or RING_FORKED: the ring failed; nothing is lost. */
int disk_link_turn(disk_link *link, const disk_transfer *transfers, unsigned count, int64_t timeout_ns, disk_end *out, unsigned room);

/* Take `count` transfers and submit what the ring has room for; look for no end. 0, -ENOMEM, or what the ring answered. */
int disk_link_start(disk_link *link, const disk_transfer *transfers, unsigned count);

/* Take `count` transfers, raise the urgency of one that was taken and has not ended, and submit. As disk_link_start. */
int disk_link_promote(disk_link *link, const disk_transfer *transfers, unsigned count, int64_t tag, int urgency);

/* Counters that are right after each call: blocks in flight, and pieces that were hashed since the link was opened. */
typedef struct {
    uint64_t in_flight, hashed;
} disk_counters;

const disk_counters *disk_link_counters(disk_link *link);

/* Free the memory. Blocks in flight must have ended: close the ring first. */
void disk_link_close(disk_link *link);
