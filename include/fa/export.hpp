#ifndef FA_EXPORT_HPP_
#define FA_EXPORT_HPP_

/// Marks what a shared build of the library exports; everything else has hidden visibility.
/// Only the C ABI (`fa.h`) is promised to be binary-stable: C++ callers rebuild with the library.
#if defined(FA_STATIC)
#define FA_API
#elif defined(_WIN32)
#if defined(FA_BUILDING)
#define FA_API __declspec(dllexport)
#else
#define FA_API __declspec(dllimport)
#endif
#else
#define FA_API __attribute__((visibility("default")))
#endif

#endif  // FA_EXPORT_HPP_
