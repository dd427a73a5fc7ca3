//! A model of who may delete objects of the store: writer ids, nonces, heirs and ages, between copies of
//! a server that do not know of each other, and indexes that one of them builds.
//!
//! Time goes in ages (gc's `older_than`). What the protocol asks of operators is built in: within every
//! age each living server is used, and puts a nonce for each of its indexes ([`Copies::has_spoken`]); no
//! operation takes longer than an age, a backup is restored within one, and an index is adopted when no
//! other copy lives, and none is made meanwhile.

mod gone;
mod steps;

use gone::Sweep;

use crate::explore::{Label, Model};

type Writer = u8;
type Nonce = u8;
type Object = u8;
type Age = u8;

/// An object is old enough after one whole age, in which every copy has had its say.
const AGES: Age = 2;

/// A rule left out, or something that was promised and does not happen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unsound {
    /// A copy that takes a new writer id does not say so under the old one.
    NoHeirs,
    /// It says so only after it has logged the new one.
    HeirAfterMint,
    /// The nonce in the store is not compared.
    NoNonce,
    /// The nonce is not compared again when the objects to delete are chosen.
    NoSecondCompare,
    /// The next nonce is put in the store before it is logged.
    NonceBeforeLog,
    /// The nonces of a writer id share one object, which is overwritten.
    OneNonceObject,
    /// A new next nonce is logged while the last one may be in the store.
    ForgetsNextNonce,
    /// An operation compares the nonce but does not change it.
    NoRotation,
    /// Pending ids are not flushed before the upload.
    UnflushedPending,
    /// Objects of an earlier writer id are deleted like own ones.
    DeletesInherited,
    /// Objects are deleted at once.
    NoAge,
    /// What a dropped index leaves is deleted at once.
    GoneWithoutAge,
    /// It is deleted when nothing was written for long, however short ago it was dropped.
    GoneByLastWrite,
    /// Copies that do nothing for longer than an age.
    IdleCopies,
    /// Servers that put nonces for some of their indexes within an age, and none for others.
    SilentIndexes,
    /// The first object of a build is put before the nonce.
    FoundAfterUpload,
    /// The nonces of an index that is gone are removed before its objects.
    NoncesFirst,
    /// What became old after gc has looked for heirs is deleted too.
    AgeAfterHeirs,
    /// Writer ids are not bound to system, timeline and database (the nonce must do).
    NoBinding,
    /// A pending object is deleted though it was published, because a crash left it on the list.
    PendingByAge,
    /// Objects under an adopted writer id are deleted though somebody has come back there.
    AdoptedForEver,
    /// An index that is here says nothing about what was written for it under other ids (the nonce must do).
    NoIndexId,
}

/// How another copy comes into being.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Fork {
    /// A copy of the files, started as it is: the same system, timeline and database.
    Twin,
    /// Promotion, point-in-time recovery or a template: another timeline or database.
    Other,
    /// Restores that each chose the same new timeline.
    Restored,
}

#[derive(Clone, Debug, Default)]
pub struct OwnershipConfig {
    pub forks: u8,
    pub fork: Option<Fork>,
    /// Forks may also start from a backup taken earlier.
    pub backups: u8,
    pub writes: u8,
    pub gcs: u8,
    pub drops: u8,
    /// Indexes that are built anew: after the servers parted, if they do. Before, it is one index more of
    /// the same kind.
    pub builds: u8,
    pub crashes: u8,
    /// Servers that are gone for good.
    pub deaths: u8,
    /// Times that an operator says so.
    pub adoptions: u8,
    pub ages: Age,
    pub unsound: Option<Unsound>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Meta {
    /// The index, whatever copy of it this is.
    index: u8,
    writer: Writer,
    binding: u8,
    nonce: Nonce,
    next: Option<Nonce>,
    root: Vec<Object>,
    retired: Vec<(Object, Age)>,
    pending: Vec<(Object, Age)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Kind {
    /// Ownership only: what VACUUM does when there is nothing to write.
    Check,
    Write,
    Collect,
    Adopt,
    Build,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Step {
    Idle,
    Compare,
    Announce(Writer),
    Mint(Writer),
    Log,
    Put,
    Remove,
    Settle,
    Name,
    Upload(Object),
    Publish(Object),
    Unlist(Object),
    Choose,
    Heirs(Vec<Object>),
    Age(Vec<Object>),
    Delete(Vec<Object>),
    TakeOver,
    ClearOthers,
    List,
    Found,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Server {
    binding: u8,
    dead: bool,
    /// A collection of what indexes left that are not there.
    sweep: Option<Sweep>,
}

/// A copy of an index.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Index {
    server: usize,
    /// The pages, and what of them a crash leaves.
    meta: Meta,
    disk: Meta,
    dropped: bool,
    kind: Kind,
    step: Step,
    /// Whether the running operation began in this age.
    fresh: bool,
    /// Whether an operation that began in this age has ended.
    done: bool,
}

/// The objects `owner/<writer id>/...`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Owner {
    writer: Writer,
    index: u8,
    /// One object each, so that two copies that put theirs at once see each other afterwards.
    nonces: Vec<Nonce>,
    binding: u8,
    /// When anything was last put under this writer id, if a rule asks for that.
    written: Age,
    /// When a collection first found that the index is gone; nonces that are put later clear it.
    gone: Option<Age>,
    /// The ids under which copies have announced that they go on.
    heirs: Vec<Writer>,
    /// The ids that this one's index has taken over.
    adopted: Vec<Writer>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Copies {
    servers: Vec<Server>,
    indexes: Vec<Index>,
    backups: Vec<(Vec<Meta>, Age)>,
    owners: Vec<Owner>,
    /// Every object that was ever put, by id: its writer id, and whether it is still there.
    objects: Vec<(Writer, bool)>,
    now: Age,
    next_nonce: Nonce,
    next_writer: Writer,
    bindings: u8,
    forks: u8,
    backups_left: u8,
    writes: u8,
    gcs: u8,
    drops: u8,
    builds: u8,
    crashes: u8,
    deaths: u8,
    adoptions: u8,
}

impl Owner {
    fn new(writer: Writer, index: u8, binding: u8, now: Age, nonce: Nonce) -> Self {
        Self {
            writer,
            index,
            nonces: vec![nonce],
            binding,
            written: now,
            gone: None,
            heirs: Vec::new(),
            adopted: Vec::new(),
        }
    }

    /// Whether nobody writes under this id, and nobody but `by` needs what was written.
    fn is_deserted(&self, by: Writer) -> bool {
        self.nonces.is_empty() && self.heirs.iter().all(|heir| *heir == by)
    }
}

impl Index {
    fn new(server: usize, meta: Meta) -> Self {
        Self {
            server,
            disk: meta.clone(),
            meta,
            dropped: false,
            kind: Kind::Check,
            step: Step::Idle,
            fresh: false,
            done: false,
        }
    }

    /// Nobody but the session that builds it sees it.
    fn is_being_built(&self) -> bool {
        self.kind == Kind::Build && self.step != Step::Idle
    }
}

impl Meta {
    fn listed(&self) -> impl Iterator<Item = Object> {
        self.retired.iter().chain(&self.pending).map(|(object, _)| *object)
    }
}

impl Copies {
    /// Whether the object that was there at the start has been deleted.
    pub fn collected(&self) -> bool {
        !self.objects[0].1
    }

    /// The same, after a copy had replaced it under an id of its own.
    pub fn collected_by_heir(&self) -> bool {
        self.collected() && self.objects.get(1).is_some_and(|object| object.0 != 0)
    }

    /// Whether the objects of a copy that is gone for good have been deleted.
    pub fn heir_collected(&self) -> bool {
        let is_heir = |object: &Object| self.objects[usize::from(*object)].0 != 0;
        self.indexes.get(1).is_some_and(|heir| {
            self.servers[heir.server].dead
                && heir.meta.root.iter().all(is_heir)
                && self.has_none_of(heir)
        })
    }

    /// Whether those of an index have been deleted that only a server had that is gone for good.
    pub fn build_collected(&self) -> bool {
        let built = |index: &&Index| index.meta.index != 0 && !index.meta.root.is_empty();
        self.indexes
            .iter()
            .filter(built)
            .any(|index| self.servers[index.server].dead && self.has_none_of(index))
    }

    fn has_none_of(&self, index: &Index) -> bool {
        index.meta.root.iter().all(|object| !self.objects[usize::from(*object)].1)
    }

    fn lives(&self, index: &Index) -> bool {
        !index.dropped && !self.servers[index.server].dead
    }

    /// The indexes of a server, also those that it is building.
    fn living(&self, server: usize) -> impl Iterator<Item = &Index> {
        self.indexes.iter().filter(move |index| index.server == server && self.lives(index))
    }

    /// What a copy of a server has: of every index that has been built what is on disk.
    fn on_disk(&self, server: usize) -> Vec<Meta> {
        let built = self.living(server).filter(|index| !index.is_being_built());
        built.map(|index| index.disk.clone()).collect()
    }

    /// Whether no other copy of the index lives.
    fn is_last(&self, who: usize) -> bool {
        self.indexes.iter().enumerate().all(|(other, index)| {
            let same = index.meta.index == self.indexes[who].meta.index;
            other == who || !same || !self.lives(index)
        })
    }

    fn start(&mut self, binding: u8, metas: Vec<Meta>) {
        let server = self.servers.len();
        self.servers.push(Server { binding, dead: false, sweep: None });
        self.indexes.extend(metas.into_iter().map(|meta| Index::new(server, meta)));
    }

    /// Numbers the nonces by where they are found, so that states that differ in nothing else are one.
    fn rename_nonces(&mut self) {
        let mut names: Vec<Nonce> = Vec::new();
        let mut rename = |nonce: &mut Nonce| {
            let known = names.iter().position(|name| name == nonce);
            *nonce = known.unwrap_or_else(|| {
                names.push(*nonce);
                names.len() - 1
            }) as Nonce;
        };
        let indexes = self.indexes.iter_mut().flat_map(|index| [&mut index.meta, &mut index.disk]);
        let backups = self.backups.iter_mut().flat_map(|(metas, _)| metas);
        for meta in indexes.chain(backups) {
            rename(&mut meta.nonce);
            meta.next.iter_mut().for_each(&mut rename);
        }
        for owner in &mut self.owners {
            owner.nonces.iter_mut().for_each(&mut rename);
            owner.nonces.sort_unstable();
        }
        for sweep in self.servers.iter_mut().filter_map(|server| server.sweep.as_mut()) {
            sweep.nonces.iter_mut().for_each(&mut rename);
            sweep.nonces.sort_unstable();
        }
        self.next_nonce = names.len() as Nonce;
    }
}

pub struct OwnershipModel {
    pub config: OwnershipConfig,
}

type Steps = Vec<(Label, Result<Copies, String>)>;

impl OwnershipModel {
    fn is(&self, unsound: Unsound) -> bool {
        self.config.unsound == Some(unsound)
    }

    /// One server with one object.
    pub fn initial(&self) -> Copies {
        let meta = Meta {
            index: 0,
            writer: 0,
            binding: 0,
            nonce: 0,
            next: None,
            root: vec![0],
            retired: Vec::new(),
            pending: Vec::new(),
        };
        let owner = Owner::new(0, 0, 0, 0, 0);
        let config = &self.config;
        Copies {
            servers: vec![Server { binding: 0, dead: false, sweep: None }],
            indexes: vec![Index::new(0, meta)],
            backups: Vec::new(),
            owners: vec![owner],
            objects: vec![(0, true)],
            now: 0,
            next_nonce: 1,
            next_writer: 1,
            bindings: 1,
            forks: config.forks,
            backups_left: config.backups,
            writes: config.writes,
            gcs: config.gcs,
            drops: config.drops,
            builds: config.builds,
            crashes: config.crashes,
            deaths: config.deaths,
            adoptions: config.adoptions,
        }
    }

    /// One server that has adopted what it inherited, and a backup of the one that is gone.
    pub fn adopted(&self) -> Copies {
        let mut copies = self.initial();
        copies.backups.push((copies.on_disk(0), 0));
        let meta = Meta { writer: 1, binding: 1, nonce: 1, ..copies.indexes[0].meta.clone() };
        copies.servers[0].dead = true;
        copies.start(1, vec![meta]);
        (copies.owners[0].nonces, copies.owners[0].heirs) = (Vec::new(), vec![1]);
        copies.owners.push(Owner { adopted: vec![0], ..Owner::new(1, 0, 1, 0, 1) });
        (copies.next_writer, copies.next_nonce, copies.bindings) = (2, 2, 2);
        copies
    }

    /// A server, and a twin that has dropped its copy of the index.
    pub fn parted(&self) -> Copies {
        let mut copies = self.initial();
        copies.start(0, Vec::new());
        copies
    }

    /// A server that is gone for good, and two that were restored from its backup and chose the same
    /// timeline.
    pub fn restored(&self) -> Copies {
        let mut copies = self.initial();
        let metas = copies.on_disk(0);
        copies.servers[0].dead = true;
        copies.start(1, metas.clone());
        copies.start(1, metas);
        copies.bindings = 2;
        copies
    }

    fn operate(&self, copies: &Copies, who: usize, out: &mut Steps) {
        let index = &copies.indexes[who];
        if !copies.lives(index) {
            return;
        }
        if index.step != Step::Idle {
            let mut next = copies.clone();
            let name = self.step(&mut next, who);
            let index = &mut next.indexes[who];
            index.done |= index.step == Step::Idle && index.fresh;
            out.push(((name, who as u8), Ok(next)));
            return;
        }
        for (kind, name, allowed) in [
            (Kind::Check, "begin: check", !index.done),
            (Kind::Write, "begin: write", copies.writes > 0),
            (Kind::Collect, "begin: gc", copies.gcs > 0),
            (Kind::Adopt, "begin: adopt", copies.adoptions > 0 && copies.is_last(who)),
        ] {
            if !allowed {
                continue;
            }
            let mut next = copies.clone();
            next.writes -= u8::from(kind == Kind::Write);
            next.gcs -= u8::from(kind == Kind::Collect);
            next.adoptions -= u8::from(kind == Kind::Adopt);
            let index = &mut next.indexes[who];
            (index.kind, index.step, index.fresh) = (kind, Step::Compare, true);
            out.push(((name, who as u8), Ok(next)));
        }
    }

    /// An index with a writer id of its own, which no other server knows.
    fn build(&self, copies: &Copies, server: usize, out: &mut Steps) {
        let parted = copies.servers.len() > 1 || self.config.forks == 0;
        if copies.builds == 0 || copies.servers[server].dead || !parted {
            return;
        }
        let mut next = copies.clone();
        next.builds -= 1;
        let meta = Meta {
            index: self.config.builds - next.builds,
            writer: next.next_writer,
            binding: copies.servers[server].binding,
            nonce: next.next_nonce,
            next: None,
            root: Vec::new(),
            retired: Vec::new(),
            pending: Vec::new(),
        };
        (next.next_writer, next.next_nonce) = (meta.writer + 1, meta.nonce + 1);
        let step = if self.is(Unsound::FoundAfterUpload) { Step::Name } else { Step::Found };
        let index = Index { kind: Kind::Build, step, fresh: true, ..Index::new(server, meta) };
        next.indexes.push(index);
        out.push((("begin: build", server as u8), Ok(next)));
    }

    fn drop_index(&self, copies: &Copies, who: usize, out: &mut Steps) {
        let index = &copies.indexes[who];
        if copies.drops > 0 && copies.lives(index) && index.step == Step::Idle {
            let mut next = copies.clone();
            next.drops -= 1;
            next.indexes[who].dropped = true;
            out.push((("drop the index", who as u8), Ok(next)));
        }
    }

    fn fork(&self, copies: &Copies, out: &mut Steps) {
        let Some(fork) = self.config.fork else { return };
        let adopts = |index: &Index| index.kind == Kind::Adopt && index.step != Step::Idle;
        if copies.indexes.iter().any(adopts) {
            return;
        }
        let mut start = |metas: Vec<Meta>, binding: u8, label| {
            let mut next = copies.clone();
            next.forks -= 1;
            let binding = match fork {
                Fork::Twin => binding,
                Fork::Other => next.bindings,
                Fork::Restored => 1,
            };
            next.bindings += 1;
            next.start(binding, metas);
            out.push((label, Ok(next)));
        };
        if copies.forks > 0 {
            for (who, server) in copies.servers.iter().enumerate() {
                let metas = copies.on_disk(who);
                if !metas.is_empty() {
                    start(metas, server.binding, ("copy a server", who as u8));
                }
            }
            for (which, (metas, taken)) in copies.backups.iter().enumerate() {
                if copies.now < taken + AGES {
                    start(metas.clone(), 0, ("restore a backup", which as u8));
                }
            }
        }
        let metas = copies.on_disk(0);
        if copies.backups_left > 0 && !metas.is_empty() {
            let mut next = copies.clone();
            next.backups_left -= 1;
            next.backups.push((metas, copies.now));
            out.push((("take a backup", 0), Ok(next)));
        }
    }

    /// Whether a server has done within this age what is asked of it: a nonce for each of its indexes, by
    /// a check if nothing else was to do.
    fn has_spoken(&self, copies: &Copies, server: usize) -> bool {
        let built = || copies.living(server).filter(|index| !index.is_being_built());
        match self.config.unsound {
            Some(Unsound::IdleCopies) => true,
            Some(Unsound::SilentIndexes) => built().count() == 0 || built().any(|i| i.done),
            _ => built().all(|index| index.done),
        }
    }

    fn pass_time(&self, copies: &Copies, out: &mut Steps) {
        let busy = |server: &Server| server.sweep.as_ref().is_some_and(|sweep| !sweep.fresh);
        let is_busy = |index: &Index| index.step != Step::Idle && !index.fresh;
        let waits = |(who, server): (usize, &Server)| {
            busy(server) || copies.living(who).any(is_busy) || !self.has_spoken(copies, who)
        };
        if copies.now == self.config.ages || copies.servers.iter().enumerate().any(waits) {
            return;
        }
        let mut next = copies.clone();
        next.now += 1;
        for index in &mut next.indexes {
            (index.fresh, index.done) = (false, false);
            // The log does not stay unflushed for so long.
            index.disk = index.meta.clone();
        }
        for sweep in next.servers.iter_mut().filter_map(|server| server.sweep.as_mut()) {
            sweep.fresh = false;
        }
        out.push((("an age passes", next.now), Ok(next)));
    }

    fn crash(&self, copies: &Copies, server: usize, out: &mut Steps) {
        let lives = |server: usize| copies.living(server).next().is_some();
        // Not those of which nothing is left but what they dropped.
        let goes_on = |server: usize| {
            lives(server) || copies.indexes.iter().all(|index| index.server != server)
        };
        let others = (0..copies.servers.len()).any(|other| other != server && goes_on(other));
        if copies.deaths > 0 && lives(server) && others {
            let mut next = copies.clone();
            next.deaths -= 1;
            next.servers[server].dead = true;
            next.servers[server].sweep = None;
            out.push((("gone for good", server as u8), Ok(next)));
        }
        if copies.crashes == 0 || !lives(server) && copies.servers[server].sweep.is_none() {
            return;
        }
        // The whole log may have been flushed by others, or only what this protocol flushes.
        for keeps_all in [false, true] {
            let mut next = copies.clone();
            next.crashes -= 1;
            next.servers[server].sweep = None;
            for index in next.indexes.iter_mut().filter(|index| index.server == server) {
                let minting =
                    self.is(Unsound::HeirAfterMint) && matches!(index.step, Step::Announce(_));
                if keeps_all && !minting {
                    index.disk = index.meta.clone();
                }
                index.meta = index.disk.clone();
                index.dropped |= index.is_being_built();
                index.step = Step::Idle;
            }
            let name = if keeps_all { "crash, all flushed" } else { "crash" };
            out.push(((name, server as u8), Ok(next)));
        }
    }

    /// Makes states one that differ only in what nothing asks for.
    fn normalize(&self, copies: &mut Copies) {
        copies.rename_nonces();
        for index in copies.indexes.iter_mut().filter(|index| index.step == Step::Idle) {
            (index.kind, index.fresh) = (Kind::Check, false);
        }
        if !self.is(Unsound::GoneByLastWrite) {
            copies.owners.iter_mut().for_each(|owner| owner.written = 0);
        }
    }
}

impl Model for OwnershipModel {
    type State = Copies;

    fn steps(&self, copies: &Copies, out: &mut Steps) {
        for who in 0..copies.indexes.len() {
            self.operate(copies, who, out);
            self.drop_index(copies, who, out);
        }
        for server in 0..copies.servers.len() {
            self.build(copies, server, out);
            self.collect_gone(copies, server, out);
            self.crash(copies, server, out);
        }
        self.fork(copies, out);
        self.pass_time(copies, out);
        out.iter_mut().for_each(|(_, next)| next.iter_mut().for_each(|next| self.normalize(next)));
    }

    fn check(&self, copies: &Copies) -> Result<(), String> {
        let living = || copies.indexes.iter().filter(|index| copies.lives(index));
        for index in living() {
            for object in index.meta.root.iter().chain(&index.disk.root) {
                if !copies.objects[usize::from(*object)].1 {
                    return Err(format!("server {} lost object {object}", index.server));
                }
            }
        }
        // Nobody else was ever there: then nothing may be inherited, and nothing forgotten.
        if copies.servers.len() == 1 {
            // The first has writer id 0, and each that is built draws one.
            if (0..).zip(&copies.indexes).any(|(who, index)| index.meta.writer != who) {
                return Err("a server that was never copied took another writer id".into());
            }
            for (object, (writer, there)) in (0..).zip(&copies.objects) {
                let known = match living().find(|index| index.meta.writer == *writer) {
                    Some(index) => {
                        index.meta.root.contains(&object)
                            || index.meta.listed().any(|listed| listed == object)
                    }
                    // For who collects what is gone.
                    None => {
                        let mut owners = copies.owners.iter();
                        owners.any(|owner| owner.writer == *writer && !owner.nonces.is_empty())
                    }
                };
                if *there && !known {
                    return Err(format!("object {object} is forgotten"));
                }
            }
        }
        Ok(())
    }
}
