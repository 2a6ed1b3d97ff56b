#ifndef FA_VERSION_H_
#define FA_VERSION_H_

/* The version of these headers; fa_version() and fa::version() say that of the library that runs. In C and in C++.
 * Until 1.0 every minor version may change the C++ API, and has a SONAME of its own. */

#define FA_VERSION_MAJOR 0
#define FA_VERSION_MINOR 1
#define FA_VERSION_PATCH 0

#define FA_VERSION_STRING "0.1.0"

/* To be compared: 0.1.0 is 100, 1.2.3 is 10203. */
#define FA_VERSION_NUMBER (FA_VERSION_MAJOR * 10000 + FA_VERSION_MINOR * 100 + FA_VERSION_PATCH)

#endif /* FA_VERSION_H_ */
