/* An engine that costs nothing: canned answers over HTTP/1.1, one thread, epoll.
 *
 *   upstream PORT [--chunks N] [--interval-us M]
 *
 * POST answers a small chat completion, or, when the body holds "stream":true, N server-sent events, one every M
 * microseconds (0: as fast as the reader takes them). GET answers what routers ask before they route. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
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

enum { MAX_FDS = 8192, HEAD_ROOM = 65536, OUT_LIMIT = 65536 };

struct connection {
    int fd;
    char *in;
    size_t in_size, in_room;
    char *out;
    size_t out_size, out_sent, out_room;
    long chunks_left; /* of the stream under way; -1 when there is none */
    uint64_t next_us;
    int writing; /* EPOLLOUT is asked for */
};

static struct connection *connections[MAX_FDS];
static int streaming[MAX_FDS], streams;
static int epoll;
static long chunks = 100, interval_us = 2000;

static const char CHUNK[] =
    "data: {\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1796118273,"
    "\"model\":\"bench\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},\"logprobs\":null,"
    "\"finish_reason\":null}]}\n\n";
static const char LAST[] =
    "data: {\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1796118273,"
    "\"model\":\"bench\",\"choices\":[],\"usage\":{\"prompt_tokens\":16,\"total_tokens\":116,"
    "\"completion_tokens\":100}}\n\ndata: [DONE]\n\n";
static const char WHOLE[] =
    "{\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion\",\"created\":1796118273,\"model\":\"bench\","
    "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"Red, green and blue.\"},"
    "\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":16,\"total_tokens\":22,"
    "\"completion_tokens\":6,\"prompt_tokens_details\":{\"cached_tokens\":0}}}";
static const char MODELS[] = "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"object\":\"model\",\"created\":1,"
                             "\"owned_by\":\"bench\",\"root\":\"bench\",\"max_model_len\":131072}]}";
static const char INFO[] = "{\"model_path\":\"bench\",\"model_id\":\"bench\",\"served_model_name\":\"bench\","
                           "\"tokenizer_path\":\"bench\",\"is_generation\":true,\"version\":\"0.5.0\"}";
static const char METRICS[] = "vllm:num_requests_running{model_name=\"bench\"} 0.0\n"
                              "vllm:num_requests_waiting{model_name=\"bench\"} 0.0\n";

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

static void *grow(void *memory, size_t size) {
    memory = realloc(memory, size);
    if (!memory)
        abort();
    return memory;
}

static void put(struct connection *c, const char *data, size_t size) {
    if (c->out_size + size > c->out_room) {
        c->out_room = 2 * (c->out_size + size);
        c->out = grow(c->out, c->out_room);
    }
    memcpy(c->out + c->out_size, data, size);
    c->out_size += size;
}

static void put_chunk(struct connection *c, const char *data, size_t size) {
    char head[32];
    put(c, head, (size_t)sprintf(head, "%zx\r\n", size));
    put(c, data, size);
    put(c, "\r\n", 2);
}

static void put_answer(struct connection *c, const char *type, const char *body) {
    char head[256];
    put(c, head,
        (size_t)sprintf(head, "HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n", type, strlen(body)));
    put(c, body, strlen(body));
}

static void stop_streaming(struct connection *c) {
    for (int i = 0; i < streams; i++)
        if (streaming[i] == c->fd) {
            streaming[i] = streaming[--streams];
            break;
        }
    c->chunks_left = -1;
}

static void drop(struct connection *c) {
    if (c->chunks_left >= 0)
        stop_streaming(c);
    connections[c->fd] = NULL;
    close(c->fd);
    free(c->in);
    free(c->out);
    free(c);
}

static int flush(struct connection *c) {
    while (c->out_sent < c->out_size) {
        ssize_t sent = send(c->fd, c->out + c->out_sent, c->out_size - c->out_sent, MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN)
            break;
        if (sent < 0)
            return -1;
        c->out_sent += (size_t)sent;
    }
    if (c->out_sent == c->out_size)
        c->out_sent = c->out_size = 0;
    int want = c->out_size > 0;
    if (want != c->writing) {
        struct epoll_event event = {.events = EPOLLIN | (want ? EPOLLOUT : 0u), .data.fd = c->fd};
        epoll_ctl(epoll, EPOLL_CTL_MOD, c->fd, &event);
        c->writing = want;
    }
    return 0;
}

/* Events of a stream that are due; without an interval, as many as the reader has room for. */
static int pump(struct connection *c, uint64_t now) {
    while (c->chunks_left >= 0 && c->next_us <= now && c->out_size - c->out_sent < OUT_LIMIT) {
        if (c->chunks_left == 0) {
            put_chunk(c, LAST, sizeof LAST - 1);
            put(c, "0\r\n\r\n", 5);
            stop_streaming(c);
        } else {
            put_chunk(c, CHUNK, sizeof CHUNK - 1);
            c->chunks_left--;
            c->next_us += (uint64_t)interval_us;
        }
        if (interval_us == 0 && c->out_size - c->out_sent >= OUT_LIMIT && flush(c) < 0)
            return -1;
    }
    return flush(c);
}

static void answer(struct connection *c, const char *head, const char *body, size_t size) {
    if (strncmp(head, "POST", 4) == 0) {
        if (memmem(body, size, "\"stream\":true", 13) || memmem(body, size, "\"stream\": true", 14)) {
            static const char start[] =
                "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
            put(c, start, sizeof start - 1);
            c->chunks_left = chunks;
            c->next_us = now_us() + (uint64_t)interval_us;
            streaming[streams++] = c->fd;
        } else {
            put_answer(c, "application/json", WHOLE);
        }
    } else if (strncmp(head, "GET /v1/models", 14) == 0) {
        put_answer(c, "application/json", MODELS);
    } else if (strncmp(head, "GET /metrics", 12) == 0) {
        put_answer(c, "text/plain", METRICS);
    } else if (strncmp(head, "GET /health", 11) == 0) {
        put_answer(c, "text/plain", "");
    } else {
        put_answer(c, "application/json", INFO);
    }
}

/* The length of a chunked body at `body`, with its text moved to its front; -1 while incomplete. */
static long unchunk(char *body, size_t size, size_t *text) {
    size_t at = 0;
    *text = 0;
    for (;;) {
        char *line = memmem(body + at, size - at, "\r\n", 2);
        if (!line)
            return -1;
        size_t length = strtoul(body + at, NULL, 16);
        size_t start = (size_t)(line - body) + 2;
        if (start + length + 2 > size)
            return -1;
        memmove(body + *text, body + start, length);
        *text += length;
        at = start + length + 2;
        if (length == 0)
            return (long)at;
    }
}

static int take_requests(struct connection *c) {
    while (c->in_size && c->chunks_left < 0) {
        c->in[c->in_size] = 0;
        char *end = strstr(c->in, "\r\n\r\n");
        if (!end)
            return c->in_size < HEAD_ROOM ? 0 : -1;
        size_t head = (size_t)(end - c->in) + 4, text = 0, total = head;
        *end = 0;
        char *length = strcasestr(c->in, "\r\ncontent-length:");
        char *chunked = strcasestr(c->in, "\r\ntransfer-encoding: chunked");
        *end = '\r';
        if (chunked) {
            /* Only a whole body is unchunked in place, so look before touching it. */
            if (!memmem(end, c->in_size - (head - 4), "0\r\n\r\n", 5))
                return 0;
            long size = unchunk(c->in + head, c->in_size - head, &text);
            if (size < 0)
                return -1;
            total += (size_t)size;
        } else if (length) {
            text = strtoul(length + 17, NULL, 10);
            total += text;
            if (c->in_size < total)
                return 0;
        }
        answer(c, c->in, c->in + head, text);
        memmove(c->in, c->in + total, c->in_size - total);
        c->in_size -= total;
    }
    return 0;
}

static int receive(struct connection *c) {
    for (;;) {
        if (c->in_room - c->in_size < HEAD_ROOM) {
            c->in_room = 2 * c->in_room + HEAD_ROOM + 1;
            c->in = grow(c->in, c->in_room);
        }
        size_t room = c->in_room - c->in_size - 1;
        ssize_t got = recv(c->fd, c->in + c->in_size, room, 0);
        if (got < 0)
            return errno == EAGAIN ? take_requests(c) : -1;
        if (got == 0)
            return -1;
        c->in_size += (size_t)got;
        if ((size_t)got < room)
            return take_requests(c);
    }
}

static void accept_all(int listener) {
    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK), on = 1;
        if (fd < 0)
            return;
        if (fd >= MAX_FDS) {
            close(fd);
            continue;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        struct connection *c = calloc(1, sizeof *c);
        if (!c)
            abort();
        c->fd = fd;
        c->chunks_left = -1;
        connections[fd] = c;
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
    }
}

int main(int count, char **words) {
    if (count < 2) {
        fprintf(stderr, "usage: upstream PORT [--chunks N] [--interval-us M]\n");
        return 2;
    }
    for (int i = 2; i + 1 < count; i += 2) {
        if (!strcmp(words[i], "--chunks"))
            chunks = atol(words[i + 1]);
        else if (!strcmp(words[i], "--interval-us"))
            interval_us = atol(words[i + 1]);
    }
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), on = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(words[1]))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 4096)) {
        perror("upstream");
        return 1;
    }
    epoll = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener};
    epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event);
    struct epoll_event ready[512];
    for (;;) {
        int wait_ms = -1;
        if (streams) {
            uint64_t now = now_us(), next = UINT64_MAX;
            for (int i = 0; i < streams; i++) {
                struct connection *c = connections[streaming[i]];
                if (c->out_size - c->out_sent < OUT_LIMIT && c->next_us < next)
                    next = c->next_us;
            }
            wait_ms = next == UINT64_MAX ? -1 : next <= now ? 0 : (int)((next - now + 999) / 1000);
        }
        int found = epoll_wait(epoll, ready, 512, wait_ms);
        for (int i = 0; i < found; i++) {
            if (ready[i].data.fd == listener) {
                accept_all(listener);
                continue;
            }
            struct connection *c = connections[ready[i].data.fd];
            if (c && (((ready[i].events & ~(uint32_t)EPOLLOUT) && receive(c) < 0) || pump(c, now_us()) < 0))
                drop(c);
        }
        uint64_t now = now_us();
        for (int i = streams - 1; i >= 0; i--) {
            struct connection *c = connections[streaming[i]];
            if (c->next_us <= now && pump(c, now) < 0)
                drop(c);
            if (i > streams)
                i = streams;
        }
    }
}
