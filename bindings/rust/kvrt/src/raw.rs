//! What the modules share about structs of the C interface.

/// A struct of the interface that holds no pointer but null ones.
#[derive(Clone, Copy, Debug, Default)]
#[repr(transparent)]
pub(crate) struct Plain<T>(pub(crate) T);

// SAFETY: without pointers the struct is numbers, which any thread may have. Whoever puts one into
// `Plain` keeps to that.
unsafe impl<T> Send for Plain<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Plain<T> {}

/// A report as a struct of public fields, taken from the one that the library fills.
macro_rules! report {
    ($(#[$doc:meta])* $name:ident from $raw:ident {
        $($(#[$field_doc:meta])* $field:ident: $type:ty,)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        #[non_exhaustive]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }

        impl From<kvrt_sys::$raw> for $name {
            fn from(raw: kvrt_sys::$raw) -> Self {
                $name { $($field: raw.$field.into(),)* }
            }
        }
    };
}

/// Setters of a builder that go straight to a field of its raw struct.
macro_rules! setters {
    ($($(#[$doc:meta])* $field:ident: $type:ty,)*) => {$(
        $(#[$doc])*
        #[must_use]
        pub fn $field(mut self, value: $type) -> Self {
            self.raw.0.$field = value;
            self
        }
    )*};
}

/// Setters of a builder that switch a flag of its raw struct on or off.
macro_rules! flags {
    ($($(#[$doc:meta])* $name:ident = $flag:ident,)*) => {$(
        $(#[$doc])*
        #[must_use]
        pub fn $name(mut self, on: bool) -> Self {
            self.raw.0.flags &= !kvrt_sys::$flag;
            if on {
                self.raw.0.flags |= kvrt_sys::$flag;
            }
            self
        }
    )*};
}

pub(crate) use {flags, report, setters};
