//! Statuses and errors: every failed call is an `Error` with the library's message.

use std::ffi::CStr;
use std::fmt;

use kvrt_sys as sys;

use crate::Category;

/// A status of the C interface: 0 is success, negative values are errors.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Status(i32);

impl Status {
    pub const OK: Status = Status(sys::KV_OK);
    pub const INVALID: Status = Status(sys::KV_INVALID);
    pub const UNSUPPORTED: Status = Status(sys::KV_UNSUPPORTED);
    pub const STALE: Status = Status(sys::KV_STALE);
    pub const NO_SNAPSHOT: Status = Status(sys::KV_NO_SNAPSHOT);
    pub const AGAIN: Status = Status(sys::KV_AGAIN);
    pub const TOO_LARGE: Status = Status(sys::KV_TOO_LARGE);
    pub const LIMIT: Status = Status(sys::KV_LIMIT);
    pub const NO_MEMORY: Status = Status(sys::KV_NO_MEMORY);
    pub const DEVICE: Status = Status(sys::KV_DEVICE);
    pub const IO: Status = Status(sys::KV_IO);
    pub const CORRUPT: Status = Status(sys::KV_CORRUPT);
    pub const INTERNAL: Status = Status(sys::KV_INTERNAL);

    pub fn from_code(code: i32) -> Status {
        Status(code)
    }

    pub fn code(self) -> i32 {
        self.0
    }

    /// `KV_AGAIN` and the like; `KV_UNKNOWN` for a code that the library does not know.
    pub fn name(self) -> &'static str {
        // SAFETY: the library returns a literal, which lives as long as the process.
        let name = unsafe { CStr::from_ptr(sys::kv_status_name(self.0)) };
        name.to_str().unwrap_or("KV_UNKNOWN")
    }

    /// Also of a code that the library does not know.
    pub fn category(self) -> Category {
        // SAFETY: a plain function, safe from any thread.
        Category::from(unsafe { sys::kv_status_category(self.0) })
    }

    pub fn is_error(self) -> bool {
        self.0 < 0
    }
}

impl fmt::Display for Status {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}({})", self.name(), self.0)
    }
}

pub type Result<T> = std::result::Result<T, Error>;

macro_rules! errors {
    ($($(#[$doc:meta])* $variant:ident = $status:ident,)*) => {
        /// Why a call failed, with a sentence that names the argument and what would be right.
        /// After an error nothing has changed, unless the call says otherwise.
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum Error {
            $($(#[$doc])* $variant(String),)*
            /// A code that this crate does not know: treat it as its category.
            Other { status: Status, message: String },
        }

        impl Error {
            /// The error of a status that is one.
            pub(crate) fn new(status: Status, message: String) -> Error {
                match status {
                    $(Status::$status => Error::$variant(message),)*
                    _ => Error::Other { status, message },
                }
            }

            pub fn status(&self) -> Status {
                match self {
                    $(Error::$variant(_) => Status::$status,)*
                    Error::Other { status, .. } => *status,
                }
            }

            pub fn message(&self) -> &str {
                match self {
                    $(Error::$variant(message) => message,)*
                    Error::Other { message, .. } => message,
                }
            }
        }
    };
}

errors! {
    /// An argument or the order of calls is wrong.
    Invalid = INVALID,
    /// This build or this geometry cannot; also askable beforehand.
    Unsupported = UNSUPPORTED,
    /// The sequence is gone.
    Stale = STALE,
    /// What lies before that position is no longer stored.
    NoSnapshot = NO_SNAPSHOT,
    /// Not now: blocks will come back.
    Again = AGAIN,
    /// Never fits this pool.
    TooLarge = TOO_LARGE,
    /// A limit given at creation is reached.
    Limit = LIMIT,
    /// The host's or the system's allocator refused.
    NoMemory = NO_MEMORY,
    /// The device or its driver failed.
    Device = DEVICE,
    /// A file or a store could not be read or written.
    Io = IO,
    /// Checksum, version or geometry does not match; nothing was taken.
    Corrupt = CORRUPT,
    /// A defect of the library: please report it.
    Internal = INTERNAL,
}

impl Error {
    /// The number of the status in the C interface.
    pub fn code(&self) -> i32 {
        self.status().code()
    }

    pub fn category(&self) -> Category {
        self.status().category()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.status(), self.message())
    }
}

impl std::error::Error for Error {}

/// The verdict of a call that was made on this thread just now.
pub(crate) fn check(code: sys::kv_status) -> Result<()> {
    let status = Status(code);
    if status.is_error() {
        return Err(Error::new(status, last_message()));
    }
    Ok(())
}

/// This thread's last message.
fn last_message() -> String {
    let mut bytes = vec![0u8; 512];
    loop {
        // SAFETY: the library writes at most `bytes.len()` bytes, the terminator among them.
        let length = unsafe { sys::kv_last_error(bytes.as_mut_ptr().cast(), bytes.len()) };
        if length < bytes.len() {
            bytes.truncate(length);
            return String::from_utf8_lossy(&bytes).into_owned();
        }
        bytes.resize(length + 1, 0);
    }
}

/// The number of elements of a slice for the library, which counts in 32 bits.
pub(crate) fn count_of<T>(elements: &[T], name: &str) -> Result<u32> {
    u32::try_from(elements.len()).map_err(|_| {
        Error::Invalid(format!("{name}: {} elements are more than 2^32 - 1", elements.len()))
    })
}

/// An array whose length the library cannot see must have the one that it will assume.
pub(crate) fn check_length<T>(elements: &[T], needed: u64, name: &str) -> Result<()> {
    if elements.len() as u64 == needed {
        return Ok(());
    }
    Err(Error::Invalid(format!("{name}: {} elements, {needed} are needed", elements.len())))
}
