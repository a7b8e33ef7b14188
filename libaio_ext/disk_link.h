#ifndef TIERED_DISK_LINK_H
#define TIERED_DISK_LINK_H

#include <stdint.h>

#include "requests.h"

#include "disk_link.cdef.h"

#endif
