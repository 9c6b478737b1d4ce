// Checksums of pages, and pages of a file with their checksums: what is read is summed while it is in the processor's
// cache, so that memory is passed once. page_sums.py has the formula, and its twin.

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include <unistd.h>

namespace {

constexpr int64_t kWords = 512;                           // of a line
constexpr int64_t kLine = kWords * sizeof(uint64_t);      // bytes
constexpr int64_t kPart = 64 * kLine;                     // bytes that are read before they are summed

uint64_t line_sum(const char* line, const uint64_t* factors) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < kWords; i++) {
        uint64_t word;
        std::memcpy(&word, line + i * sizeof word, sizeof word);
        sum += (word ^ word >> 32) * factors[i];
    }
    return sum;
}

// Sum of the lines of a part of a page. The last line of a page may be shorter; zeros follow it.
uint64_t part_sum(const char* part, int64_t bytes, const uint64_t* factors, const uint64_t* line_factors) {
    uint64_t sum = 0;
    int64_t at = 0;
    for (; at + kLine <= bytes; at += kLine) sum += line_sum(part + at, factors) * *line_factors++;
    if (at < bytes) {
        char last[kLine] = {};
        std::memcpy(last, part + at, bytes - at);
        sum += line_sum(last, factors) * *line_factors;
    }
    return sum;
}

// Fills memory from a file's place on. Returns 0, -1 if the file ends before, or the number of an error.
int fill(int descriptor, char* into, int64_t bytes, int64_t at) {
    while (bytes > 0) {
        const ssize_t count = pread(descriptor, into, bytes, at);
        if (count == 0) return -1;
        if (count < 0 && errno != EINTR) return errno;
        if (count > 0) into += count, at += count, bytes -= count;
    }
    return 0;
}

}  // namespace

extern "C" {

// Sums pages in rows of a memory; before, reads them from a file's place on, unless the descriptor is -1.
//
// descriptor, at: the file, and the place of the first page.
// rows, bytes: the memory, and bytes of a row. slots: int32 [pages], rows of the pages.
// factors: uint64 [512 + lines of a page]. sums: uint64 [pages], to be written.
// Returns 0, -1 if the file ends before the last page, or the number of an error.
int sum_pages(int descriptor, int64_t at, char* rows, int64_t bytes, const int32_t* slots, int64_t pages,
              const uint64_t* factors, uint64_t* sums) {
    for (int64_t i = 0; i < pages; i++, at += bytes) {
        char* row = rows + slots[i] * bytes;
        sums[i] = 0;
        for (int64_t start = 0; start < bytes; start += kPart) {
            const int64_t size = std::min(kPart, bytes - start);
            if (descriptor >= 0)
                if (const int error = fill(descriptor, row + start, size, at + start)) return error;
            sums[i] += part_sum(row + start, size, factors, factors + kWords + start / kLine);
        }
    }
    return 0;
}
}
