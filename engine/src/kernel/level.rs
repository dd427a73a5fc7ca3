use std::sync::atomic::{AtomicU8, Ordering};

/// An instruction set that kernels are compiled for. Which ones there are depends on the architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    /// Plain Rust, vectorised by the compiler for the target's baseline (NEON on aarch64).
    Scalar = 0,
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2 = 1,
    /// AVX-512 F, BW, VL and DQ, besides AVX2's.
    #[cfg(target_arch = "x86_64")]
    Avx512 = 2,
    /// Kernels written for NEON, where the compiler does not find its table lookups and conversions.
    #[cfg(target_arch = "aarch64")]
    Neon = 3,
}

/// From the least to the best.
const ALL: &[Level] = &[
    Level::Scalar,
    #[cfg(target_arch = "x86_64")]
    Level::Avx2,
    #[cfg(target_arch = "x86_64")]
    Level::Avx512,
    #[cfg(target_arch = "aarch64")]
    Level::Neon,
];

const UNKNOWN: u8 = u8::MAX;
static BEST: AtomicU8 = AtomicU8::new(UNKNOWN);
static FORCED: AtomicU8 = AtomicU8::new(UNKNOWN);

impl Level {
    /// The best level of this CPU.
    #[inline]
    pub fn best() -> Self {
        match Self::from_code(BEST.load(Ordering::Relaxed)) {
            Some(level) => level,
            None => detect(),
        }
    }

    /// The level in use: the best one, unless [`Level::force`] chose a lower one.
    #[inline]
    pub fn current() -> Self {
        match Self::from_code(FORCED.load(Ordering::Relaxed)) {
            Some(level) => level.min(Self::best()),
            None => Self::best(),
        }
    }

    /// Makes the whole process use this level, or the CPU's best again. For tests and benchmarks;
    /// harmless at any time, since all levels give the same results.
    pub fn force(level: Option<Self>) {
        FORCED.store(level.map_or(UNKNOWN, |level| level as u8), Ordering::Relaxed);
    }

    /// All levels that this CPU can run, the scalar one first.
    pub fn available() -> impl Iterator<Item = Self> {
        ALL.iter().copied().filter(|&level| level <= Self::best())
    }

    #[inline]
    fn from_code(code: u8) -> Option<Self> {
        ALL.iter().copied().find(|&level| level as u8 == code)
    }
}

#[cold]
fn detect() -> Level {
    #[cfg(target_arch = "x86_64")]
    let level = {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq");
        match (avx2, avx512) {
            (true, true) => Level::Avx512,
            (true, false) => Level::Avx2,
            _ => Level::Scalar,
        }
    };
    // NEON is part of the target.
    #[cfg(target_arch = "aarch64")]
    let level = Level::Neon;
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let level = Level::Scalar;
    BEST.store(level as u8, Ordering::Relaxed);
    level
}

/// Compiles one body once per level and chooses at run time. The body is plain Rust that the compiler
/// vectorises; Rust never reorders or fuses its floating-point operations, so all copies agree.
macro_rules! per_level {
    ($(#[$meta:meta])* $name:ident, $at:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)?, $body:path) => {
        $(#[$meta])*
        #[inline]
        pub fn $name($($arg: $ty),*) $(-> $ret)? {
            $at($crate::kernel::Level::current(), $($arg),*)
        }

        #[doc = concat!("[`", stringify!($name), "`] at a given level (or the CPU's best, if that is lower).")]
        #[inline]
        pub fn $at(level: $crate::kernel::Level, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    $body($($arg),*)
                }
                #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    $body($($arg),*)
                }
                match level.min($crate::kernel::Level::best()) {
                    // SAFETY: `best` found these features on this CPU.
                    $crate::kernel::Level::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::kernel::Level::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::kernel::Level::Scalar => {}
                }
            }
            let _ = level;
            $body($($arg),*)
        }
    };
}
pub(crate) use per_level;
