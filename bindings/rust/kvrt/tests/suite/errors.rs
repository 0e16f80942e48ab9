//! Errors, statuses and the numbers of the interface.

use kvrt::{Category, Error, Format, LogLevel, Scorer, Status};

#[test]
fn statuses_have_names_and_categories() {
    let expected = [
        (Status::OK, "KV_OK", 0, Category::Ok),
        (Status::INVALID, "KV_INVALID", -100, Category::Argument),
        (Status::UNSUPPORTED, "KV_UNSUPPORTED", -101, Category::Argument),
        (Status::STALE, "KV_STALE", -200, Category::State),
        (Status::NO_SNAPSHOT, "KV_NO_SNAPSHOT", -201, Category::State),
        (Status::AGAIN, "KV_AGAIN", -300, Category::Capacity),
        (Status::TOO_LARGE, "KV_TOO_LARGE", -301, Category::Capacity),
        (Status::LIMIT, "KV_LIMIT", -302, Category::Capacity),
        (Status::NO_MEMORY, "KV_NO_MEMORY", -303, Category::Capacity),
        (Status::DEVICE, "KV_DEVICE", -400, Category::Device),
        (Status::IO, "KV_IO", -500, Category::Io),
        (Status::CORRUPT, "KV_CORRUPT", -501, Category::Io),
        (Status::INTERNAL, "KV_INTERNAL", -600, Category::Internal),
    ];
    for (status, name, code, category) in expected {
        assert_eq!((status.name(), status.code(), status.category()), (name, code, category));
        assert_eq!(status.is_error(), code < 0);
        assert_eq!(Status::from_code(code), status);
        assert_eq!(status.to_string(), name);
    }
}

#[test]
fn an_unknown_code_keeps_its_number_and_counts_as_its_category() {
    let status = Status::from_code(-377);
    assert_eq!((status.code(), status.name()), (-377, "KV_UNKNOWN"));
    assert_eq!(status.category(), Category::Capacity);
    let error = Error::Other { status, message: "something new".to_string() };
    assert_eq!((error.code(), error.category()), (-377, Category::Capacity));
    assert_eq!(error.to_string(), "KV_UNKNOWN: something new");
    assert_eq!(format!("{status:?}"), "KV_UNKNOWN(-377)");
}

#[test]
fn an_error_says_what_the_library_says() {
    let error =
        kvrt::Pool::create(&crate::common::config().block_tokens(17), &crate::common::model(1))
            .unwrap_err();
    assert!(matches!(error, Error::Invalid(_)));
    assert_eq!(error.message(), "config: block_tokens is 17: 16, 32, 64 or 128");
    assert_eq!(error.to_string(), "KV_INVALID: config: block_tokens is 17: 16, 32, 64 or 128");
    let boxed: Box<dyn std::error::Error + Send + Sync> = error.into();
    assert!(boxed.to_string().starts_with("KV_INVALID"));
}

#[test]
fn numbers_without_a_name_here_are_kept() {
    assert_eq!(Format::from(3), Format::Bf16);
    assert_eq!(Format::from(99), Format::Other(99));
    assert_eq!(Format::Other(99).code(), 99);
    assert_eq!(Scorer::from(Scorer::KeyNorm.code()), Scorer::KeyNorm);
    assert_eq!(LogLevel::from(-5), LogLevel::Other(-5));
}

#[test]
fn the_library_says_what_it_is_and_can() {
    let version = kvrt::version();
    assert_eq!((version.major, version.minor), (0, 1));
    assert!(version.to_string().starts_with("0.1."));
    let capabilities = kvrt::capabilities().unwrap();
    assert!(capabilities.has_format(Format::F16) && capabilities.has_format(Format::F32));
    assert!(capabilities.has_format(Format::Affine4));
    assert!(!capabilities.has_format(Format::Other(21)));
    assert!(!capabilities.has_format(Format::Other(63)));
    assert!(!capabilities.has_format(Format::Other(64)));
    assert!(capabilities.has_device(kvrt::Device::Cpu));
    assert!(capabilities.has_layout(kvrt::Layout::Hnd));
    assert!(capabilities.has_scorer(Scorer::TriAttention));
    assert!(capabilities.has_selection(kvrt::Selection::Union));
    assert_eq!((capabilities.min_head_dim, capabilities.max_head_dim), (32, 256));
    assert_eq!((capabilities.head_dim_multiple, capabilities.max_layers), (8, 1024));
    assert!(!capabilities.simd_target.is_empty());
    assert!(capabilities.simd_target.chars().all(|letter| letter.is_ascii_graphic()));
}
