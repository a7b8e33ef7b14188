/* Stands between the ring and libaio (ld --wrap) and does what kernels may do and seldom do. Counts what it did. */
#include <errno.h>
#include <libaio.h>
#include <string.h>
#include <unistd.h>

int shim_cuts;        /* this many completions claim ... */
long shim_cut_to;     /* ... that they moved only so many bytes, */
int shim_interrupted; /* this many claim that a signal came first, */
int shim_refuse_rest; /* and this many ask for more than was moved only to be told EINVAL, */
int shim_take;        /* io_submit takes at most so many at a time (0: all), */
int shim_busy;        /* and this many times it says that it has no room; */
int shim_getevents_eintr; /* io_getevents says this many times, after waiting, that a signal came, */
int shim_getevents_eio;   /* and this many times that it failed. */
int shim_fired;
int shim_submitted; /* requests that io_submit was given */

int __real_io_submit(io_context_t context, long count, struct iocb **iocbs);
int __real_io_getevents(io_context_t context, long least, long most, struct io_event *events, struct timespec *timeout);

int __wrap_io_submit(io_context_t context, long count, struct iocb **iocbs)
{
    if (shim_busy) {
        shim_busy--;
        shim_fired++;
        return -EAGAIN;
    }
    if (shim_take && count > shim_take) {
        shim_fired++;
        count = shim_take;
    }
    shim_submitted += (int)count;
    return __real_io_submit(context, count, iocbs);
}

/* What lies behind the claimed end was never moved, as far as the ring may know: make it wrong, so that it has to be. */
static void spoil(const struct iocb *iocb, long moved)
{
    char *rest = (char *)iocb->u.c.buf + moved;
    size_t size = iocb->u.c.nbytes - (size_t)moved;
    if (iocb->aio_lio_opcode == IO_CMD_PREAD) {
        memset(rest, 0xAA, size);
    } else {
        char wrong[512];
        memset(wrong, 0xAA, sizeof(wrong));
        for (size_t at = 0; at < size; at += sizeof(wrong)) {
            size_t n = size - at < sizeof(wrong) ? size - at : sizeof(wrong);
            if (pwrite(iocb->aio_fildes, wrong, n, iocb->u.c.offset + moved + (long)at) < 0)
                return;
        }
    }
}

int __wrap_io_getevents(io_context_t context, long least, long most, struct io_event *events, struct timespec *timeout)
{
    int waits = !timeout || timeout->tv_sec || timeout->tv_nsec;
    if (shim_getevents_eintr && waits) {
        shim_getevents_eintr--;
        shim_fired++;
        return -EINTR;
    }
    if (shim_getevents_eio) {
        shim_getevents_eio--;
        shim_fired++;
        return -EIO;
    }
    int count = __real_io_getevents(context, least, most, events, timeout);
    for (int i = 0; i < count; i++) {
        long result = (long)events[i].res;
        if (shim_interrupted) {
            shim_interrupted--;
            shim_fired++;
            spoil(events[i].obj, 0);
            events[i].res = (unsigned long)-EINTR;
        } else if (shim_cuts && result > shim_cut_to) {
            shim_cuts--;
            shim_fired++;
            spoil(events[i].obj, shim_cut_to);
            events[i].res = (unsigned long)shim_cut_to;
        } else if (shim_refuse_rest) {
            shim_refuse_rest--;
            shim_fired++;
            events[i].res = (unsigned long)-EINVAL;
        }
    }
    return count;
}
