#ifndef TIERED_REQUESTS_H
#define TIERED_REQUESTS_H

#include <stdint.h>

#include "requests.cdef.h"

#endif
