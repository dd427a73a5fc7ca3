//! Who may write and delete under a writer id: the protocol of docs/decisions/0010-object-ownership.md.
//!
//! Copies of an index do not know of each other. Every operation on the store first claims the index: it
//! replaces the nonce that lies in the store, and so sees whether somebody else has done that. The order
//! of the steps is that of the model in tests/model/src/ownership.rs; change it there first.

pub mod owner;

use pgrx::pg_sys;
use polign_engine::ObjectId;
use polign_pages::meta::Writer;

use super::Target;
use crate::{
    clock,
    error::Result,
    failpoint,
    pages::{
        Index, Steps,
        meta::{self, Meta},
    },
};

/// Minutes for which VACUUM and gc trust the last ownership check: one costs three requests.
const CHECK_MINUTES: u32 = 60;
/// Minutes for which scans do.
const CHECK_AT_SCAN_MINUTES: u32 = 24 * 60;
const MICROSECONDS_A_MINUTE: i64 = 60_000_000;

/// Who writes, and where.
#[derive(Debug, Clone)]
pub struct Claim {
    pub target: Target,
    pub writer: Writer,
    /// By how much the store's clock was ahead of this server's, if it was looked at.
    pub clock_ahead_ms: i64,
}

/// Makes this server the one that may write under the index's writer id, and gives that. Comes before the
/// first upload of every operation on the store. A copy of an index gets a new writer id: what it
/// inherits is read, and never deleted.
///
/// The caller holds the maintenance lock: two sessions of one server must not take each other for a copy.
/// Waits for the store between steps; interruptible. Wherever it ends early, the next claim goes on from
/// there.
pub fn claim(steps: &mut impl Steps) -> Result<Claim> {
    let (index, name, found) = steps.step(|index| {
        meta::ensure_id(index)?;
        Ok((index.oid(), index.name(), meta::read(index)?))
    })?;
    let target = super::store_of(&name, &found)?;
    let (writer, clock_ahead_ms) = begin(steps, index, &found, &target)?;
    failpoint::pass("claim: logged");
    owner::put_nonce(&target.url, index, found.index_id, &writer, writer.next_nonce)?;
    failpoint::pass("claim: put");
    if !writer.nonce.is_nil() {
        owner::delete_nonce(&target.url, writer.id, writer.nonce)?;
    }
    failpoint::pass("claim: deleted");
    let now = minutes_now();
    let writer = steps.step(|index| {
        meta::update(index, |meta| {
            meta.writer.nonce = writer.next_nonce;
            meta.writer.next_nonce = ObjectId::NIL;
            meta.writer_checked = now;
            Ok(meta.writer)
        })
    })?;
    Ok(Claim { target, writer, clock_ahead_ms })
}

/// An ownership check: claims the index, to see whether it is a copy, if it has objects and nobody has
/// looked for a while. The caller holds the maintenance lock.
pub fn check(steps: &mut impl Steps) -> Result<()> {
    if steps.step(|index| Ok(is_check_due(&*meta::read(index)?)))? {
        claim(steps)?;
    }
    Ok(())
}

fn is_check_due(meta: &Meta) -> bool {
    let Meta { writer, writer_checked, .. } = meta;
    let recent = is_recent(*writer_checked, minutes_now(), CHECK_MINUTES);
    let unsettled = !writer.next_nonce.is_nil() || writer.binding != meta::current_binding();
    !writer.id.is_nil() && (unsettled || !recent)
}

/// Whether a scan that begins has to see to it that the writer is compared with the store, as far as can be
/// told without the store: the index is a copy that has not gone on under a writer id of its own yet, or it
/// has been read only for so long that others, who cannot know that it is there, might take it for gone.
pub fn is_check_due_at_scan(meta: &Meta) -> bool {
    // SAFETY: reads the time at which the statement began: scans have no call to the system to spare.
    let now = unsafe { pg_sys::GetCurrentStatementStartTimestamp() };
    let Meta { writer, writer_checked, .. } = meta;
    !writer.id.is_nil()
        && (writer.binding != meta::current_binding()
            || !is_recent(*writer_checked, minutes(now), CHECK_AT_SCAN_MINUTES))
}

/// Whether the last check was less than so many minutes ago. One in the future is none: the clock was put
/// right since.
fn is_recent(checked: u32, now: u32, minutes: u32) -> bool {
    now.checked_sub(checked).is_some_and(|age| age < minutes)
}

/// Chooses the writer id and the next nonce. They are in the meta page, and on disk, when this returns. Also
/// gives by how much the store's clock is ahead; who has just taken an id retires nothing of their own.
fn begin(
    steps: &mut impl Steps,
    index: pg_sys::Oid,
    found: &Meta,
    target: &Target,
) -> Result<(Writer, i64)> {
    let writer = found.writer;
    let mut ahead_ms = 0;
    let binding = meta::current_binding();
    if !writer.id.is_nil() {
        let is_known = |nonce: &ObjectId| [writer.nonce, writer.next_nonce].contains(nonce);
        let is_ours = writer.binding == binding && {
            let (owners, now_ms) = owner::list_with_clock(&target.url, writer.id)?;
            ahead_ms = clock::ahead_ms(now_ms);
            owners.nonces.iter().all(is_known)
        };
        if is_ours && !writer.next_nonce.is_nil() {
            // A change was interrupted. Its nonce may be in the store, and is not to be forgotten: it is
            // the one to put.
            return Ok((writer, ahead_ms));
        }
        if is_ours {
            let next_nonce = meta::random_id()?;
            return steps.step(|index| {
                meta::update_durably(index, |meta| {
                    meta.writer.next_nonce = next_nonce;
                    Ok((meta.writer, ahead_ms))
                })
            });
        }
    }
    let minted = Writer {
        id: meta::random_id()?,
        binding,
        nonce: ObjectId::NIL,
        next_nonce: meta::random_id()?,
    };
    if !writer.id.is_nil() {
        // First of all the origin has to know that somebody else needs what it wrote so far.
        owner::put_heir(&target.url, index, found.index_id, writer.id, (minted.id, binding))?;
    }
    steps.step(|index| {
        meta::update_durably(index, |meta| {
            meta.writer = minted;
            meta.store_id = target.store_id;
            meta.store_url.clone_from(&target.url);
            Ok((minted, ahead_ms))
        })
    })
}

/// Puts the owner object of an index that is being built, which nobody else can see yet. Comes before its
/// first upload.
pub fn found(target: &Target, index: Index, meta: &Meta) -> Result<()> {
    // While this transaction runs, nothing under the writer id is garbage: it needs an id for that.
    // SAFETY: called in a transaction that writes.
    unsafe { pg_sys::GetTopFullTransactionId() };
    owner::put_nonce(&target.url, index.oid(), meta.index_id, &meta.writer, meta.writer.nonce)
}

/// What [`Meta::writer_checked`] is at first: scans need not check, since the nonce was put just now, but
/// nothing was compared, so the first VACUUM does.
pub fn checked_at_build() -> u32 {
    minutes_now().saturating_sub(CHECK_MINUTES)
}

fn minutes_now() -> u32 {
    // SAFETY: reads the clock.
    minutes(unsafe { pg_sys::GetCurrentTimestamp() })
}

fn minutes(time: pg_sys::TimestampTz) -> u32 {
    u32::try_from(time / MICROSECONDS_A_MINUTE).unwrap_or(0)
}
