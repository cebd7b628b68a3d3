/* A load of event streams: keeps S of them open and measures what comes.
 *
 *   streamload HOST PORT --streams S --seconds T --path P --body FILE
 *
 * Prints one line of JSON: streams completed and failed, events and events/s, and percentiles of the time to the first
 * event and of the gaps between events, in milliseconds. One thread, epoll; each stream has a keep-alive connection. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { BUFFER = 262144, BINS = 200000, BIN_US = 20 };

struct stream {
    int fd;
    size_t sent;
    uint64_t started, last;
    char tail[16]; /* the last bytes seen: a pattern may lie across two reads */
    size_t tail_size;
    long events;
    int done; /* [DONE] has come, perhaps in an earlier read than the end of the body */
};

static struct sockaddr_in address;
static char *request;
static size_t request_size;
static int epoll;
static long completed, failed, events;
static uint32_t ttft[BINS], gaps[BINS];
static long ttfts, gap_count;

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

static void count(uint32_t *bins, uint64_t us) {
    uint64_t bin = us / BIN_US;
    bins[bin < BINS ? bin : BINS - 1]++;
}

static double percentile(const uint32_t *bins, long total, double share) {
    long seen = 0;
    for (int i = 0; i < BINS; i++)
        if ((seen += bins[i]) > (long)(share * (double)total))
            return (i + 0.5) * BIN_US / 1000.0;
    return 0;
}

static void want(struct stream *s, int write) {
    struct epoll_event event = {.events = EPOLLIN | (write ? EPOLLOUT : 0u), .data.ptr = s};
    epoll_ctl(epoll, EPOLL_CTL_MOD, s->fd, &event);
}

static void connect_stream(struct stream *s) {
    int on = 1;
    s->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(s->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(s->fd, (struct sockaddr *)&address, sizeof address) && errno != EINPROGRESS) {
        perror("connect");
        exit(1);
    }
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.ptr = s};
    epoll_ctl(epoll, EPOLL_CTL_ADD, s->fd, &event);
}

static void begin(struct stream *s) {
    s->sent = s->tail_size = 0;
    s->events = 0;
    s->done = 0;
    s->started = now_us();
}

static void reconnect(struct stream *s) {
    close(s->fd);
    connect_stream(s);
    begin(s);
}

static void send_some(struct stream *s) {
    while (s->sent < request_size) {
        ssize_t n = send(s->fd, request + s->sent, request_size - s->sent, MSG_NOSIGNAL);
        if (n < 0)
            return;
        s->sent += (size_t)n;
    }
    want(s, 0);
}

/* Events are counted by their first bytes and a stream's end by the last chunk of its coding; an event's text holds
 * neither. */
static void scan(struct stream *s, const char *data, size_t size, uint64_t now) {
    static char joined[BUFFER + 16];
    memcpy(joined, s->tail, s->tail_size);
    memcpy(joined + s->tail_size, data, size);
    size_t total = s->tail_size + size, keep = 0;
    const char *at = joined, *end = joined + total;
    const char *found;
    while ((found = memmem(at, (size_t)(end - at), "data: {", 7))) {
        if (s->events++ == 0) {
            count(ttft, now - s->started);
            ttfts++;
        } else {
            count(gaps, now - s->last);
            gap_count++;
        }
        s->last = now;
        events++;
        at = found + 7;
    }
    if (memmem(joined, total, "[DONE]", 6))
        s->done = 1;
    if (memmem(joined, total, "\r\n0\r\n\r\n", 7)) {
        if (s->done && s->events)
            completed++;
        else
            failed++;
        begin(s);
        want(s, 1);
        return;
    }
    /* Less than either pattern that was looked for, so that nothing is found twice. */
    keep = (size_t)(end - at) < 6 ? (size_t)(end - at) : 6;
    memcpy(s->tail, end - keep, keep);
    s->tail_size = keep;
}

int main(int argc, char **argv) {
    int streams = 64;
    double seconds = 3;
    const char *path = "/v1/chat/completions", *body_path = NULL;
    if (argc < 3)
        return 2;
    for (int i = 3; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--streams"))
            streams = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--seconds"))
            seconds = atof(argv[i + 1]);
        else if (!strcmp(argv[i], "--path"))
            path = argv[i + 1];
        else if (!strcmp(argv[i], "--body"))
            body_path = argv[i + 1];
    }
    static char body[1 << 22];
    size_t body_size = 0;
    FILE *file = body_path ? fopen(body_path, "rb") : NULL;
    if (file) {
        body_size = fread(body, 1, sizeof body, file);
        fclose(file);
    }
    request = malloc(body_size + 1024);
    request_size = (size_t)sprintf(request,
                                   "POST %s HTTP/1.1\r\nhost: %s:%s\r\ncontent-type: application/json\r\n"
                                   "content-length: %zu\r\n\r\n",
                                   path, argv[1], argv[2], body_size);
    memcpy(request + request_size, body, body_size);
    request_size += body_size;
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)atoi(argv[2]));
    inet_pton(AF_INET, argv[1], &address.sin_addr);
    epoll = epoll_create1(0);
    struct stream *all = calloc((size_t)streams, sizeof *all);
    for (int i = 0; i < streams; i++) {
        connect_stream(&all[i]);
        begin(&all[i]);
    }
    uint64_t start = now_us(), end = start + (uint64_t)(seconds * 1e6);
    struct epoll_event ready[512];
    static char data[BUFFER];
    while (now_us() < end) {
        int found = epoll_wait(epoll, ready, 512, 50);
        for (int i = 0; i < found; i++) {
            struct stream *s = ready[i].data.ptr;
            if (ready[i].events & EPOLLOUT)
                send_some(s);
            if (ready[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
                ssize_t got = recv(s->fd, data, sizeof data, 0);
                if (got > 0) {
                    scan(s, data, (size_t)got, now_us());
                } else if (got == 0 || errno != EAGAIN) {
                    failed++;
                    reconnect(s);
                }
            }
        }
    }
    double took = (double)(now_us() - start) / 1e6;
    printf("{\"streams\": %d, \"completed\": %ld, \"failed\": %ld, \"events\": %ld, \"events_per_s\": %.1f, "
           "\"ttft_ms\": {\"p50\": %.2f, \"p99\": %.2f}, \"gap_ms\": {\"p50\": %.2f, \"p99\": %.2f}, \"total_s\": %.2f}\n",
           streams, completed, failed, events, (double)events / took, percentile(ttft, ttfts, 0.5),
           percentile(ttft, ttfts, 0.99), percentile(gaps, gap_count, 0.5), percentile(gaps, gap_count, 0.99), took);
    return 0;
}
