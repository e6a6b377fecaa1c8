/* nvidia-smi, for programs that ask it which GPUs there are. It is a separate process and cannot see others, so the
 * memory in use is that of one context. Options and fields: https://docs.nvidia.com/deploy/nvidia-smi. */
#include "null.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LONGEST_LIST 1024

enum unit { PLAIN, MIB_OF_MEMORY, PERCENT, WATTS };
static const char *const UNITS[] = {"", " MiB", " %", " W"};

/* The value of a field of --query-gpu for a GPU; NULL: the null device does not know it. */
static const char *value(const char *field, int device, enum unit *unit) {
    static char text[256];
    const struct null_card *card = null_card();
    size_t used = null_in_use(device), bytes = 0;
    *unit = PLAIN;
    if (!strcmp(field, "name") || !strcmp(field, "gpu_name")) return card->name;
    if (!strcmp(field, "driver_version")) return "null device";
    if (!strncmp(field, "utilization.", strlen("utilization."))) return *unit = PERCENT, "0";
    if (!strcmp(field, "power.draw")) return *unit = WATTS, "0.00";
    if (!strcmp(field, "temperature.gpu")) return "0";
    if (!strcmp(field, "index"))
        snprintf(text, sizeof text, "%d", device);
    else if (!strcmp(field, "count"))
        snprintf(text, sizeof text, "%d", card->gpus);
    else if (!strcmp(field, "uuid") || !strcmp(field, "gpu_uuid"))
        snprintf(text, sizeof text, "GPU-%02x000000-0000-0000-0000-000000000000", device + 1);
    else if (!strcmp(field, "compute_cap"))
        snprintf(text, sizeof text, "%d.%d", card->major, card->minor);
    else {
        if (!strcmp(field, "memory.total")) bytes = card->memory;
        else if (!strcmp(field, "memory.used")) bytes = used;
        else if (!strcmp(field, "memory.free")) bytes = card->memory - used;
        else return NULL;
        *unit = MIB_OF_MEMORY;
        snprintf(text, sizeof text, "%zu", bytes >> 20);
    }
    return text;
}

/* The fields of a list, in a line: their names, or their values for a GPU. */
static void line(const char *list, int device, bool heading, bool units) {
    char fields[LONGEST_LIST], *rest = NULL;
    snprintf(fields, sizeof fields, "%s", list);
    const char *comma = "";
    for (char *field = strtok_r(fields, ", ", &rest); field != NULL; field = strtok_r(NULL, ", ", &rest)) {
        enum unit unit;
        const char *said = value(field, device, &unit);
        const char *after = units ? UNITS[unit] : "";
        if (heading) printf(*after ? "%s%s [%s]" : "%s%s", comma, field, after + 1);
        else printf("%s%s%s", comma, said == NULL ? "[N/A]" : said, said == NULL ? "" : after);
        comma = ", ";
    }
    printf("\n");
}

static const char *after(const char *word, const char *option) { /* NULL: it is another option */
    size_t length = strlen(option);
    return strncmp(word, option, length) == 0 ? word + length : NULL;
}

int main(int count, char **words) {
    const struct null_card *card = null_card();
    const char *list = NULL, *format = "", *found;
    int first = 0, last = card->gpus;
    bool names = false;
    for (int i = 1; i < count; i++) {
        if ((found = after(words[i], "--query-gpu=")) != NULL) list = found;
        else if ((found = after(words[i], "--format=")) != NULL) format = found;
        else if ((found = after(words[i], "--id=")) != NULL) last = (first = atoi(found)) + 1;
        else if (!strcmp(words[i], "-i") && i + 1 < count) last = (first = atoi(words[++i])) + 1;
        else if (!strcmp(words[i], "-L") || !strcmp(words[i], "--list-gpus")) names = true;
        else {
            fprintf(stderr, "nvidia-smi of memcalc's null device does not know %s\n", words[i]);
            return 2;
        }
    }
    if (first < 0 || last > card->gpus) {
        fprintf(stderr, "No devices were found\n");
        return 6;
    }
    bool units = strstr(format, "nounits") == NULL;
    if (list != NULL && strstr(format, "noheader") == NULL) line(list, 0, true, units);
    for (int device = first; device < last; device++) {
        enum unit unit;
        if (list != NULL) line(list, device, false, units);
        else if (names) printf("GPU %d: %s (UUID: %s)\n", device, card->name, value("uuid", device, &unit));
        else printf("GPU %d: %s, a null device, %zu MiB\n", device, card->name, (size_t)card->memory >> 20);
    }
    return 0;
}
