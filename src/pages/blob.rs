//! The sections of the root as blobs over pages.

use polign_engine::ObjectId;
pub use polign_pages::blob::BlobHead;
use polign_pages::{Link, PageError, PageKind, PageRef, blob, blob::BlobPages};

use super::{
    free::Spare,
    meta::Meta,
    record::Record,
    relation::{Access, Fault, Index, PageImage},
};
use crate::error::Result;

/// The pages of an index as blobs see them.
struct Pages {
    index: Index,
    index_id: ObjectId,
    image: PageImage,
}

impl Pages {
    fn new(index: Index, index_id: ObjectId) -> Self {
        Self { index, index_id, image: PageImage::new() }
    }
}

/// [`Fault`] with room for errors that name no page yet.
enum BlobFault {
    Fault(Fault),
    Page(PageError),
}

impl From<PageError> for BlobFault {
    fn from(error: PageError) -> Self {
        Self::Page(error)
    }
}

impl BlobFault {
    fn settle(self, index: Index, head: Option<&BlobHead>) -> Fault {
        match self {
            Self::Fault(fault) => fault,
            Self::Page(error) => {
                let block = head.and_then(|head| head.root).map_or(0, |root| root.block);
                Fault::Error(index.damaged(block, error))
            }
        }
    }
}

impl BlobPages for Pages {
    type Error = BlobFault;

    fn read<T>(
        &mut self,
        link: Link,
        kind: PageKind,
        read: impl FnOnce(PageRef<'_>) -> std::result::Result<T, PageError>,
    ) -> std::result::Result<T, BlobFault> {
        pgrx::check_for_interrupts!();
        let copied = self.index.copy(link, self.index_id, kind, &mut self.image);
        copied.map_err(BlobFault::Fault)?;
        let result = self.image.page().and_then(read);
        result.map_err(|error| BlobFault::Fault(self.index.fault(link, error)))
    }

    fn prefetch(&mut self, pages: &mut dyn Iterator<Item = Link>) {
        self.index.prefetch(pages.map(|link| link.block));
    }

    fn write(&mut self, kind: PageKind, content: &[u8]) -> std::result::Result<Link, BlobFault> {
        loop {
            pgrx::check_for_interrupts!();
            let spare = Spare::find(self.index);
            let mut record = Record::start(self.index);
            let Some(locked) = spare.take() else { continue };
            let (at, link) = record.create(locked, kind, self.index_id)?;
            record.page(at)?.resize(content.len())?.copy_from_slice(content);
            record.finish();
            return Ok(link);
        }
    }
}

/// Reads a section of the root. `meta` is the meta page that named it.
pub fn read(index: Index, meta: &Meta, head: &BlobHead) -> Access<Vec<u8>> {
    let mut pages = Pages::new(index, meta.index_id);
    blob::read(head, &mut pages).map_err(|fault| fault.settle(index, Some(head)))
}

/// Reads all sections of the root, with their kinds.
pub fn read_root(index: Index, meta: &Meta) -> Access<Vec<(u32, Vec<u8>)>> {
    meta.sections.iter().map(|head| Ok((head.section, read(index, meta, head)?))).collect()
}

/// A root whose pages are written, but which no page refers to yet.
#[derive(Debug)]
pub struct WrittenRoot {
    /// For the meta page.
    pub sections: Vec<BlobHead>,
    /// Pages of the old root that the new one does not share: to be freed (`free_pages`) after the meta
    /// page names the new one.
    pub replaced: Vec<Link>,
}

/// Writes the sections of a root, sharing unchanged pages with the root that `meta` names. Whoever
/// publishes it holds the layout lock from before this call to after the publication, so that no sweep
/// takes the pages for leftovers; a new index that nobody else sees needs no lock.
pub fn write_root(
    index: Index,
    meta: &Meta,
    epoch: u64,
    sections: &[(u32, &[u8])],
) -> Result<WrittenRoot> {
    let mut pages = Pages::new(index, meta.index_id);
    let mut root = WrittenRoot { sections: Vec::new(), replaced: Vec::new() };
    for &(section, bytes) in sections {
        let old = meta.section(section);
        let written = blob::write(section, epoch, bytes, old, &mut pages)
            .map_err(|fault| index.settled(fault.settle(index, old)))?;
        root.sections.push(written.head);
        root.replaced.extend(written.replaced);
    }
    for dropped in &meta.sections {
        if !sections.iter().any(|(section, _)| *section == dropped.section) {
            root.replaced.extend(links(index, meta, dropped).map_err(|f| index.settled(f))?);
        }
    }
    Ok(root)
}

/// Every page of a section.
pub(super) fn links(index: Index, meta: &Meta, head: &BlobHead) -> Access<Vec<Link>> {
    let mut pages = Pages::new(index, meta.index_id);
    blob::links(head, &mut pages).map_err(|fault| fault.settle(index, Some(head)))
}
