/* Linux native AIO as a ring: submit, reap. One thread uses it; no policy, no allocation after open.
 *
 * A slot is in one of four places: free, pending (the kernel does not have it), in flight (it does), done (not handed out yet).
 */
#define _GNU_SOURCE
#include "aio_ring.h"

#include <errno.h>
#include <fcntl.h>
#include <libaio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define SECTOR 512            /* no disk has smaller blocks, so O_DIRECT never continues at a finer grain */
#define RETRY_NS 1000000      /* pause before a request is offered again that the kernel had no resources for */
#define CLOSE_RETRIES 1000    /* and how often close does that before it gives up on requests that were never taken */

struct slot {
    struct iocb iocb;
    int operation;
    int fd;
    int64_t offset;
    uint64_t address;
    uint64_t nbytes;
    uint64_t moved;
    int64_t tag;
    int64_t result;
};

struct fifo {
    struct slot **items;
    unsigned size, head, count;
};

struct aio_ring {
    io_context_t context;
    pid_t owner;
    int wakeup;
    unsigned depth;
    unsigned in_flight;
    struct fifo free, pending, done;
    struct slot *slots;
    struct iocb **batch;
    struct io_event *events;
};

/* ---- queues of slots ---- */

static void push(struct fifo *fifo, struct slot *slot)
{
    fifo->items[(fifo->head + fifo->count++) % fifo->size] = slot;
}

static struct slot *peek(const struct fifo *fifo, unsigned i)
{
    return fifo->items[(fifo->head + i) % fifo->size];
}

static struct slot *pop(struct fifo *fifo)
{
    struct slot *slot = fifo->items[fifo->head];
    fifo->head = (fifo->head + 1) % fifo->size;
    fifo->count--;
    return slot;
}

/* ---- time, wake-ups ---- */

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static struct timespec timespec_of(int64_t ns)
{
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
    return t;
}

/* The kernel signals the eventfd for completions of its own only. What is done or stuck without one needs our signal. */
static void wake_if_due(struct aio_ring *ring)
{
    if (ring->done.count || (ring->pending.count && !ring->in_flight))
        (void)eventfd_write(ring->wakeup, 1);
}

static void drain_wakeup(struct aio_ring *ring)
{
    eventfd_t ignored;
    (void)eventfd_read(ring->wakeup, &ignored); /* EAGAIN: nobody has signalled */
}

/* ---- a request's life ---- */

static void prepare(struct aio_ring *ring, struct slot *slot)
{
    void *address = (void *)(uintptr_t)(slot->address + slot->moved);
    uint64_t nbytes = slot->nbytes - slot->moved;
    int64_t offset = slot->offset + (int64_t)slot->moved;

    if (slot->operation == RING_WRITE)
        io_prep_pwrite(&slot->iocb, slot->fd, address, nbytes, offset);
    else
        io_prep_pread(&slot->iocb, slot->fd, address, nbytes, offset);
    io_set_eventfd(&slot->iocb, ring->wakeup);
    slot->iocb.data = slot;
    push(&ring->pending, slot);
}

static void finish(struct aio_ring *ring, struct slot *slot, int64_t result)
{
    slot->result = result;
    push(&ring->done, slot);
}

static int is_direct(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    return flags != -1 && (flags & O_DIRECT);
}

/* The kernel is through with a slot: it is done, or the rest of a short transfer goes to the kernel again.
 *
 * With O_DIRECT the last block of a file comes back as the bytes that it has. Asking on from there would be misaligned and end
 * in EINVAL instead of an honest short count.
 */
static void settle(struct aio_ring *ring, struct slot *slot, int64_t result)
{
    if (result == -EINTR) { /* what aio makes of a signal that reached a network filesystem: nothing was moved */
        prepare(ring, slot);
    } else if (result == -EINVAL && slot->moved && is_direct(slot->fd)) { /* the tail, on a disk of larger sectors */
        finish(ring, slot, (int64_t)slot->moved);
    } else if (result < 0) {
        finish(ring, slot, result);
    } else {
        slot->moved += (uint64_t)result;
        if (result == 0 || slot->moved >= slot->nbytes || (slot->moved % SECTOR && is_direct(slot->fd)))
            finish(ring, slot, (int64_t)slot->moved);
        else
            prepare(ring, slot);
    }
}

/* io_submit takes requests from the front until one is bad, and tells that one's errno only when it is the first. */
static void submit_pending(struct aio_ring *ring)
{
    while (ring->pending.count) {
        for (unsigned i = 0; i < ring->pending.count; i++)
            ring->batch[i] = &peek(&ring->pending, i)->iocb;

        int taken = io_submit(ring->context, (long)ring->pending.count, ring->batch);
        if (taken > 0) {
            ring->in_flight += (unsigned)taken;
            while (taken-- > 0)
                (void)pop(&ring->pending);
        } else if (taken == -EAGAIN || taken == 0) {
            return; /* no room now: offered again after a completion, or after a pause */
        } else if (taken != -EINTR) {
            finish(ring, pop(&ring->pending), taken);
        }
    }
}

/* Take what the kernel has completed, waiting for `at_least` of it (`timeout` NULL: for ever). 0 or a negative errno. */
static int harvest(struct aio_ring *ring, unsigned at_least, struct timespec *timeout)
{
    int count = io_getevents(ring->context, (long)at_least, (long)ring->depth, ring->events, timeout);
    for (int i = 0; i < count; i++) {
        ring->in_flight--;
        settle(ring, ring->events[i].data, (int64_t)(long)ring->events[i].res);
    }
    return count < 0 ? count : 0;
}

static int pause_for(int64_t ns)
{
    struct timespec pause = timespec_of(ns);
    return nanosleep(&pause, NULL) ? -errno : 0;
}

/* ---- interface ---- */

static int is_forked(const struct aio_ring *ring)
{
    return ring->owner != getpid();
}

static void release_memory(struct aio_ring *ring)
{
    free(ring->free.items);
    free(ring->pending.items);
    free(ring->done.items);
    free(ring->slots);
    free(ring->batch);
    free(ring->events);
    free(ring);
}

static int make_fifo(struct fifo *fifo, unsigned size)
{
    fifo->size = size;
    fifo->items = calloc(size, sizeof(*fifo->items));
    return fifo->items != NULL;
}

int aio_ring_open(unsigned depth, aio_ring **opened)
{
    if (depth == 0 || depth > INT32_MAX)
        return -EINVAL;

    struct aio_ring *ring = calloc(1, sizeof(*ring));
    if (!ring)
        return -ENOMEM;
    ring->owner = getpid();
    ring->depth = depth;
    ring->slots = calloc(depth, sizeof(*ring->slots));
    ring->batch = calloc(depth, sizeof(*ring->batch));
    ring->events = calloc(depth, sizeof(*ring->events));
    int enough = make_fifo(&ring->free, depth) & make_fifo(&ring->pending, depth) & make_fifo(&ring->done, depth);
    if (!enough || !ring->slots || !ring->batch || !ring->events) {
        release_memory(ring);
        return -ENOMEM;
    }
    for (unsigned i = 0; i < depth; i++)
        push(&ring->free, &ring->slots[i]);

    ring->wakeup = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (ring->wakeup < 0) {
        int error = errno;
        release_memory(ring);
        return -error;
    }
    int error = io_setup((int)depth, &ring->context);
    if (error < 0) {
        close(ring->wakeup);
        release_memory(ring);
        return error;
    }
    *opened = ring;
    return 0;
}

int aio_ring_submit(aio_ring *ring, const ring_request *requests, unsigned count)
{
    if (is_forked(ring))
        return RING_FORKED;
    unsigned taken = 0;
    for (; taken < count && ring->free.count; taken++) {
        const ring_request *request = &requests[taken];
        struct slot *slot = pop(&ring->free);
        slot->operation = request->operation;
        slot->fd = request->fd;
        slot->offset = request->offset;
        slot->address = request->address;
        slot->nbytes = request->nbytes;
        slot->moved = 0;
        slot->tag = request->tag;
        prepare(ring, slot);
    }
    if (taken) {
        submit_pending(ring);
        wake_if_due(ring);
    }
    return (int)taken;
}

int aio_ring_reap(aio_ring *ring, unsigned at_least, int64_t timeout_ns, ring_completion *out, unsigned room)
{
    if (is_forked(ring))
        return RING_FORKED;

    /* Before looking at completions, never after: one that comes in between must leave its signal. */
    drain_wakeup(ring);

    int64_t deadline = now_ns() + timeout_ns;
    struct timespec no_time = {0, 0};
    int failed = ring->in_flight ? harvest(ring, 0, &no_time) : 0;
    for (;;) {
        submit_pending(ring);
        unsigned outstanding = ring->in_flight + ring->pending.count + ring->done.count;
        unsigned wanted = at_least < outstanding ? at_least : outstanding;
        int64_t left = deadline - now_ns();
        if (failed || ring->done.count >= wanted || left <= 0)
            break;
        if (ring->in_flight) {
            unsigned missing = wanted - ring->done.count;
            if (ring->pending.count) /* any completion may make room for these */
                missing = 1;
            else if (missing > ring->in_flight)
                missing = ring->in_flight;
            struct timespec timeout = timespec_of(left);
            failed = harvest(ring, missing, &timeout);
        } else {
            failed = pause_for(left < RETRY_NS ? left : RETRY_NS);
        }
    }
    if (failed == -EINTR || (failed && !ring->done.count)) {
        (void)eventfd_write(ring->wakeup, 1); /* we took the signal and not what it announced */
        return failed;
    }

    unsigned count = 0;
    while (count < room && ring->done.count) {
        struct slot *slot = pop(&ring->done);
        out[count].tag = slot->tag;
        out[count].result = slot->result;
        count++;
        push(&ring->free, slot);
    }
    wake_if_due(ring);
    return (int)count;
}

int aio_ring_fileno(aio_ring *ring)
{
    return is_forked(ring) ? RING_FORKED : ring->wakeup;
}

void aio_ring_close(aio_ring *ring)
{
    if (!is_forked(ring)) {
        for (int retries = 0; ring->in_flight || (ring->pending.count && retries < CLOSE_RETRIES);) {
            submit_pending(ring);
            if (ring->in_flight) {
                int failed = harvest(ring, 1, NULL);
                if (failed && failed != -EINTR)
                    break; /* io_destroy waits too, it only cannot go on with short transfers */
            } else if (ring->pending.count) {
                (void)pause_for(RETRY_NS);
                retries++;
            }
        }
        io_destroy(ring->context);
        close(ring->wakeup);
    }
    release_memory(ring);
}
