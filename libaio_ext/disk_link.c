/* The disk link: transfers between memory and files, cut into blocks, hashed and verified. tiered/links/disk.py is the reference:
 * the same decisions in the same order. One thread uses a link; no call of it needs Python's lock.
 *
 * A transfer is a job until it has ended. A job to be submitted is in the queue of its urgency and way; one to be written is
 * among the unhashed until all of its pieces have a digest. A piece that was read completely is among the arrived until it is
 * verified.
 */
#define _GNU_SOURCE
#include "disk_link.h"

#include "digest.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define URGENCIES 4
#define SPECULATIVE 2
#define WRITEBACK 3
#define WAYS 2
#define BUCKETS 1024 /* of the table of jobs; a power of two */
#define FAILURES 3   /* of reap in succession, after which it is an error */

struct job;

struct piece {
    struct piece *next;
    struct job *job;
    uint64_t missing; /* bytes that have not arrived */
};

struct job {
    struct job *next;          /* in its queue, or among the ended */
    struct job *next_unhashed; /* among the unhashed */
    struct job *next_known;    /* in its bucket */
    int queued, listed;        /* whether the first and the second hold */
    disk_transfer transfer;
    uint64_t length; /* bytes to move, padding included */
    uint64_t cursor; /* bytes submitted; equals the length, too, when the rest is dropped */
    uint64_t pieces, hashed;
    unsigned in_flight; /* blocks */
    unsigned unchecked; /* pieces that have arrived and wait to be verified */
    int64_t outcome, result;
    uint64_t at, size;
    struct piece *arriving;  /* of each piece; NULL when nothing is verified */
    unsigned char *digests;  /* of the first `hashed` pieces */
};

struct queue {
    struct job *first, *last;
};

struct block {
    struct job *job; /* NULL: free */
    uint64_t at, size;
    unsigned next_free;
};

struct disk_link {
    disk_ring ring;
    disk_config config;
    struct queue queues[URGENCIES][WAYS];
    struct queue unhashed;
    struct piece *arrived, *last_arrived;
    struct job *ended, *last_ended, *given;
    struct job *known[BUCKETS];
    struct block *blocks;
    unsigned free_block;
    disk_counters counters;
    uint64_t bytes[WAYS];     /* in flight */
    uint64_t writing;         /* unfinished jobs to be written */
    uint64_t writeback_limit; /* most bytes of write-backs in flight */
    uint64_t counted;         /* bytes written without a pause, */
    int64_t since;            /* and the time when that began */
    unsigned failures;
    ring_request *batch;
    ring_completion *completions;
};

static int64_t system_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t largest(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* ---- queues ---- */

static struct queue *queue_of(struct disk_link *link, const struct job *job)
{
    return &link->queues[job->transfer.urgency][job->transfer.way];
}

static void append(struct disk_link *link, struct job *job)
{
    struct queue *queue = queue_of(link, job);
    job->next = NULL;
    job->queued = 1;
    if (queue->first)
        queue->last->next = job;
    else
        queue->first = job;
    queue->last = job;
}

static void prepend(struct disk_link *link, struct job *job)
{
    struct queue *queue = queue_of(link, job);
    job->next = queue->first;
    job->queued = 1;
    if (!queue->first)
        queue->last = job;
    queue->first = job;
}

static void leave_queue(struct disk_link *link, struct job *job)
{
    struct queue *queue = queue_of(link, job);
    struct job *before = NULL, *at = queue->first;
    while (at != job) {
        before = at;
        at = at->next;
    }
    if (before)
        before->next = job->next;
    else
        queue->first = job->next;
    if (queue->last == job)
        queue->last = before;
    job->queued = 0;
}

static void leave_unhashed(struct disk_link *link, struct job *job)
{
    struct job *before = NULL, *at = link->unhashed.first;
    while (at != job) {
        before = at;
        at = at->next_unhashed;
    }
    if (before)
        before->next_unhashed = job->next_unhashed;
    else
        link->unhashed.first = job->next_unhashed;
    if (link->unhashed.last == job)
        link->unhashed.last = before;
    job->listed = 0;
}

/* ---- jobs ---- */

static struct job **bucket_of(struct disk_link *link, int64_t tag)
{
    return &link->known[(uint64_t)tag % BUCKETS];
}

static int begin_job(struct disk_link *link, const disk_transfer *transfer)
{
    uint64_t pieces = (transfer->nbytes + link->config.piece - 1) / link->config.piece;
    size_t each = transfer->way == RING_WRITE ? DIGEST_BYTES : transfer->expected ? sizeof(struct piece) : 0;
    struct job *job = calloc(1, sizeof(*job) + each * pieces);
    if (!job)
        return -ENOMEM;
    job->transfer = *transfer;
    job->pieces = pieces;
    job->length = (transfer->nbytes + link->config.alignment - 1) / link->config.alignment * link->config.alignment;
    if (transfer->way == RING_WRITE) {
        job->digests = (unsigned char *)(job + 1);
        memset((void *)(uintptr_t)(transfer->address + transfer->nbytes), 0, job->length - transfer->nbytes);
        if (link->unhashed.first)
            link->unhashed.last->next_unhashed = job;
        else
            link->unhashed.first = job;
        link->unhashed.last = job;
        job->listed = 1;
        if (!link->writing++) { /* after a pause the drive's rate may have changed */
            link->counted = 0;
            link->since = link->ring.now();
            link->writeback_limit = link->config.flight / 2;
        }
    } else if (transfer->expected) {
        job->arriving = (struct piece *)(job + 1);
        for (uint64_t i = 0; i < pieces; i++) {
            job->arriving[i].job = job;
            job->arriving[i].missing = least(link->config.piece, transfer->nbytes - i * link->config.piece);
        }
    }
    struct job **bucket = bucket_of(link, transfer->tag);
    job->next_known = *bucket;
    *bucket = job;
    append(link, job);
    return 0;
}

/* Record the first error of the job, and drop its blocks that were not submitted. */
static void fail(struct job *job, int64_t outcome, uint64_t at, uint64_t size, int64_t result)
{
    if (job->outcome == DISK_DONE) {
        job->outcome = outcome;
        job->at = at;
        job->size = size;
        job->result = result;
    }
    job->cursor = job->length;
}

/* Report the job when its last block and check have ended; its slots then go back to the engine. */
static void end_if_over(struct disk_link *link, struct job *job)
{
    if (job->in_flight || job->unchecked || job->cursor < job->length)
        return;
    if (job->queued)
        leave_queue(link, job);
    if (job->listed)
        leave_unhashed(link, job);
    if (job->transfer.way == RING_WRITE)
        link->writing--;
    struct job **at = bucket_of(link, job->transfer.tag);
    while (*at != job)
        at = &(*at)->next_known;
    *at = job->next_known;
    job->next = NULL;
    if (link->ended)
        link->last_ended->next = job;
    else
        link->ended = job;
    link->last_ended = job;
}

/* ---- digests ---- */

static void put_le64(unsigned char *at, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        at[i] = (unsigned char)(value >> 8 * i);
}

/* Write the digest of a piece of the job; return the piece's bytes. */
static uint64_t digest_of(struct disk_link *link, const struct job *job, uint64_t piece, unsigned char *out)
{
    const disk_transfer *transfer = &job->transfer;
    uint64_t offset = piece * link->config.piece;
    uint64_t nbytes = least(link->config.piece, transfer->nbytes - offset);
    unsigned char context[40];
    memcpy(context, link->config.uuid, 16);
    put_le64(context + 16, transfer->tensor_id);
    put_le64(context + 24, transfer->generation);
    put_le64(context + 32, transfer->begin + offset);
    digest(context, sizeof(context), (const void *)(uintptr_t)(transfer->address + offset), nbytes, out);
    link->counters.hashed++;
    return nbytes;
}

/* Whether some of the first `end` bytes, which are to be written, have no digest yet. */
static int is_unhashed(const struct disk_link *link, const struct job *job, uint64_t end)
{
    return job->transfer.way == RING_WRITE && job->hashed * link->config.piece < least(end, job->transfer.nbytes);
}

static uint64_t hash_next(struct disk_link *link, struct job *job)
{
    uint64_t nbytes = digest_of(link, job, job->hashed, job->digests + DIGEST_BYTES * job->hashed);
    job->hashed++;
    return nbytes;
}

/* The job whose pieces to hash next, if any; of a large one no more than the ring takes, because others wait. */
static struct job *to_hash(struct disk_link *link)
{
    struct job *job;
    while ((job = link->unhashed.first)) {
        if (job->outcome == DISK_DONE && is_unhashed(link, job, job->length))
            return is_unhashed(link, job, job->cursor + link->config.flight) ? job : NULL;
        leave_unhashed(link, job);
    }
    return NULL;
}

/* Verify a piece that has arrived; return its bytes. */
static uint64_t check_first(struct disk_link *link)
{
    struct piece *piece = link->arrived;
    struct job *job = piece->job;
    uint64_t number = (uint64_t)(piece - job->arriving);
    unsigned char found[DIGEST_BYTES];

    link->arrived = piece->next;
    uint64_t nbytes = digest_of(link, job, number, found);
    if (memcmp(found, (const unsigned char *)(uintptr_t)job->transfer.expected + DIGEST_BYTES * number, DIGEST_BYTES) != 0)
        fail(job, DISK_CORRUPT, number * link->config.piece, nbytes, 0);
    job->unchecked--;
    end_if_over(link, job);
    return nbytes;
}

/* Verify pieces that have arrived, then hash pieces to be written, about one piece in all; whether there was one. */
static int hash_some(struct disk_link *link)
{
    int64_t left = (int64_t)link->config.piece;
    struct job *job;
    int worked = 0;
    while (left > 0 && link->arrived) {
        left -= (int64_t)check_first(link);
        worked = 1;
    }
    while (left > 0 && (job = to_hash(link))) {
        left -= (int64_t)hash_next(link, job);
        worked = 1;
    }
    return worked;
}

/* ---- submission ---- */

static ring_request begin_block(struct disk_link *link, struct job *job, uint64_t size)
{
    unsigned tag = link->free_block;
    struct block *block = &link->blocks[tag];
    const disk_transfer *transfer = &job->transfer;
    uint64_t at = transfer->begin + job->cursor, stripe = link->config.piece;
    int64_t fd = transfer->fd, offset = transfer->offset + (int64_t)at;

    if (transfer->files) {
        const disk_part *part = (const disk_part *)(uintptr_t)transfer->parts + at / stripe % transfer->files;
        fd = part->fd;
        offset = part->offset + (int64_t)(at / stripe / transfer->files * stripe + at % stripe);
    }
    link->free_block = block->next_free;
    block->job = job;
    block->at = job->cursor;
    block->size = size;
    link->counters.in_flight++;
    link->bytes[transfer->way] += size;
    job->in_flight++;
    ring_request request = {transfer->way, (int)fd, offset, transfer->address + job->cursor, size, tag};
    job->cursor += size;
    return request;
}

/* Undo begin_block, but for the cursor. */
static struct block end_block(struct disk_link *link, unsigned tag)
{
    struct block ended = link->blocks[tag];
    link->blocks[tag].job = NULL;
    link->blocks[tag].next_free = link->free_block;
    link->free_block = tag;
    link->counters.in_flight--;
    link->bytes[ended.job->transfer.way] -= ended.size;
    ended.job->in_flight--;
    return ended;
}

/* Submit `count` requests of the batch; how many the ring took, or its error. Those that it did not take wait in their queues
   again. */
static int submit_batch(struct disk_link *link, unsigned count)
{
    int taken = count ? link->ring.submit(link->ring.ring, link->batch, count) : 0;
    for (unsigned i = count; i > (unsigned)(taken < 0 ? 0 : taken); i--) {
        struct block block = end_block(link, (unsigned)link->batch[i - 1].tag);
        if (!block.job->queued)
            prepend(link, block.job);
        block.job->cursor = block.at;
    }
    return taken;
}

/* Fill the ring, the most urgent blocks first. The room that is left is kept for an urgent block that is too large for it. A job
   leaves its queue with its last block. Among equals reads go first, because a computation waits for them; but a quarter of the
   flight is the writes'. Write-backs have their own limit. 0, or the ring's error. */
static int submit(struct disk_link *link)
{
    const disk_config *config = &link->config;
    struct { struct queue *queue; uint64_t most; } turns[3 * URGENCIES];
    unsigned count = 0, waiting = 0;
    int taken;

    for (int urgency = 0; urgency < URGENCIES; urgency++) {
        struct queue *reads = &link->queues[urgency][RING_READ], *writes = &link->queues[urgency][RING_WRITE];
        if (reads->first && writes->first) {
            turns[count].queue = writes;
            turns[count++].most = config->flight / 4;
        }
        if (reads->first) {
            turns[count].queue = reads;
            turns[count++].most = urgency == SPECULATIVE ? config->block : config->flight;
        }
        if (writes->first) {
            turns[count].queue = writes;
            turns[count++].most = urgency == WRITEBACK ? link->writeback_limit : config->flight;
        }
    }
    for (unsigned turn = 0; turn < count; turn++) {
        struct job *job;
        while ((job = turns[turn].queue->first)) {
            while (job->cursor < job->length) {
                uint64_t size = least(config->block, job->length - job->cursor);
                if (job->transfer.files) /* a block is in one file */
                    size = least(size, config->piece - job->cursor % config->piece);
                uint64_t flying = link->bytes[RING_READ] + link->bytes[RING_WRITE];
                if (link->counters.in_flight == config->depth || (flying && flying + size > config->flight)) {
                    taken = submit_batch(link, waiting);
                    return taken < 0 ? taken : 0;
                }
                if (flying && link->bytes[job->transfer.way] + size > turns[turn].most)
                    break; /* this direction has its share: continue with the others */
                if (is_unhashed(link, job, job->cursor + size)) {
                    taken = submit_batch(link, waiting); /* hashing takes time, so the drive gets these now */
                    if (taken < (int)waiting)
                        return taken < 0 ? taken : 0;
                    waiting = 0;
                    do
                        hash_next(link, job);
                    while (is_unhashed(link, job, job->cursor + size));
                }
                link->batch[waiting++] = begin_block(link, job, size);
            }
            if (job->cursor < job->length)
                break;
            leave_queue(link, job);
        }
    }
    taken = submit_batch(link, waiting);
    return taken < 0 ? taken : 0;
}

/* ---- completions ---- */

/* Match a completion to its block, and update the piece and the job that it belongs to. -EPROTO: no such block is in flight. */
static int account(struct disk_link *link, const ring_completion *completion)
{
    if (completion->tag < 0 || (uint64_t)completion->tag >= link->config.depth || !link->blocks[completion->tag].job)
        return -EPROTO;
    struct block block = end_block(link, (unsigned)completion->tag);
    struct job *job = block.job;
    uint64_t piece = link->config.piece, nbytes = job->transfer.nbytes;
    int64_t own = nbytes < block.at ? 0 : (int64_t)least(nbytes - block.at, block.size);

    if (job->transfer.way == RING_WRITE && completion->result == (int64_t)block.size)
        link->counted += block.size;
    /* Of a read the tensor's own bytes are enough: a file that was cut off within padding has lost nothing. */
    if (completion->result != (int64_t)block.size
        && !(job->transfer.way == RING_READ && own <= completion->result && completion->result < (int64_t)block.size)) {
        fail(job, DISK_FAILED, block.at, block.size, completion->result);
    } else if (job->arriving && job->outcome == DISK_DONE) {
        uint64_t end = least(block.at + block.size, nbytes);
        for (uint64_t i = block.at / piece; i * piece < end; i++) {
            struct piece *arriving = &job->arriving[i];
            arriving->missing -= least(end, (i + 1) * piece) - largest(block.at, i * piece);
            if (!arriving->missing) {
                job->unchecked++;
                arriving->next = NULL;
                if (link->arrived)
                    link->last_arrived->next = arriving;
                else
                    link->arrived = arriving;
                link->last_arrived = arriving;
            }
        }
    }
    if (!job->unchecked)
        end_if_over(link, job);
    return 0;
}

/* Set the limit of write-backs by the drive's rate: what a late demand may find before it in the ring. */
static void measure(struct disk_link *link)
{
    int64_t now = link->ring.now();
    double seconds = (double)(now - link->since) * 1e-9;
    double rate = (double)link->counted / (seconds > 1e-9 ? seconds : 1e-9);
    double most = rate * (double)link->config.latency * 1e-9;
    uint64_t share = most < (double)link->config.flight ? (uint64_t)most : link->config.flight;
    link->writeback_limit = largest(link->config.flight / 2, share);
    link->counted = 0;
    link->since = now;
}

static int anything_queued(const struct disk_link *link)
{
    for (int urgency = 0; urgency < URGENCIES; urgency++)
        if (link->queues[urgency][RING_READ].first || link->queues[urgency][RING_WRITE].first)
            return 1;
    return 0;
}

static void free_jobs(struct job *job)
{
    while (job) {
        struct job *next = job->next;
        free(job);
        job = next;
    }
}

/* ---- interface ---- */

disk_link *disk_link_open(const disk_ring *ring, const disk_config *config)
{
    struct disk_link *link = calloc(1, sizeof(*link));
    if (!link)
        return NULL;
    link->ring = *ring;
    if (!link->ring.now)
        link->ring.now = system_now;
    link->config = *config;
    link->writeback_limit = config->flight / 2;
    link->blocks = calloc(config->depth, sizeof(*link->blocks));
    link->batch = calloc(config->depth, sizeof(*link->batch));
    link->completions = calloc(config->depth, sizeof(*link->completions));
    if (!link->blocks || !link->batch || !link->completions) {
        disk_link_close(link);
        return NULL;
    }
    for (unsigned i = 0; i < config->depth; i++)
        link->blocks[i].next_free = i + 1;
    return link;
}

static int begin_jobs(disk_link *link, const disk_transfer *transfers, unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        int failed = begin_job(link, &transfers[i]);
        if (failed)
            return failed;
    }
    return 0;
}

int disk_link_start(disk_link *link, const disk_transfer *transfers, unsigned count)
{
    int failed = begin_jobs(link, transfers, count);
    return failed ? failed : submit(link);
}

int disk_link_promote(disk_link *link, const disk_transfer *transfers, unsigned count, int64_t tag, int urgency)
{
    int failed = begin_jobs(link, transfers, count);
    struct job *job = *bucket_of(link, tag);
    while (job && job->transfer.tag != tag)
        job = job->next_known;
    if (job && job->transfer.urgency > urgency) {
        int queued = job->queued;
        if (queued)
            leave_queue(link, job);
        job->transfer.urgency = urgency;
        if (queued)
            append(link, job);
    }
    return failed ? failed : submit(link);
}

int disk_link_turn(disk_link *link, const disk_transfer *transfers, unsigned count, int64_t timeout_ns, disk_end *out, unsigned room)
{
    int64_t deadline = timeout_ns > 0 ? link->ring.now() + timeout_ns : 0;
    int failed = count ? disk_link_start(link, transfers, count) : 0;

    free_jobs(link->given);
    link->given = NULL;
    if (failed)
        return failed;
    while (!link->ended) {
        int64_t left = deadline ? deadline - link->ring.now() : 0;
        if (left < 0)
            left = 0;
        int64_t wait = link->arrived || to_hash(link) ? 0 : left;
        int found = link->ring.reap(link->ring.ring, wait ? 1 : 0, wait, link->completions, (unsigned)link->config.depth);
        if (found == -EINTR || found == RING_FORKED)
            return found;
        link->failures = found < 0 ? link->failures + 1 : 0;
        if (link->failures > FAILURES)
            return found;
        for (int i = 0; i < found; i++)
            if ((failed = account(link, &link->completions[i])))
                return failed;
        if (found > 0) {
            if (link->counted >= link->config.window)
                measure(link);
            if (anything_queued(link) && (failed = submit(link)))
                return failed;
        }
        int worked = hash_some(link);
        if (!link->ended && !(worked || found < 0 || (left && link->counters.in_flight)))
            break;
    }

    int given = 0;
    while (link->ended && given < (int)room) {
        struct job *job = link->ended;
        int well = job->outcome == DISK_DONE && job->digests;
        disk_end end = {
            job->transfer.tag, job->outcome, job->result, job->at, job->size, well ? job->pieces : 0,
            well ? (uint64_t)(uintptr_t)job->digests : 0,
        };
        out[given++] = end;
        link->ended = job->next;
        job->next = link->given;
        link->given = job;
    }
    return given;
}

const disk_counters *disk_link_counters(disk_link *link)
{
    return &link->counters;
}

void disk_link_close(disk_link *link)
{
    for (unsigned i = 0; i < BUCKETS; i++)
        while (link->known[i]) {
            struct job *job = link->known[i];
            link->known[i] = job->next_known;
            free(job);
        }
    free_jobs(link->ended);
    free_jobs(link->given);
    free(link->blocks);
    free(link->batch);
    free(link->completions);
    free(link);
}
