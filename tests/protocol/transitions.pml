/* Written by python -m tests.protocol.transitions from exporter.py and importer.py. */

#define NOTHING 255  /* in place of a state, after an event that cannot happen */

#define EXPORT_COMPUTING 0
#define EXPORT_PUBLISHED 1
#define EXPORT_LOST 2
#define EXPORT_PINNED 3
#define EXPORT_FREE 4

#define EXPORT_PUBLISH 0
#define EXPORT_REVOKE 1
#define EXPORT_LOSE 2
#define EXPORT_FINISH 3
#define EXPORT_ABORT 4
#define EXPORT_LEASE_ENDED 5

#define AFTER_EXPORT(state, event) ( \
    (state == EXPORT_COMPUTING && event == EXPORT_PUBLISH) -> EXPORT_PUBLISHED : ( \
    (state == EXPORT_COMPUTING && event == EXPORT_REVOKE) -> EXPORT_COMPUTING : ( \
    (state == EXPORT_COMPUTING && event == EXPORT_FINISH) -> EXPORT_PINNED : ( \
    (state == EXPORT_COMPUTING && event == EXPORT_ABORT) -> EXPORT_FREE : ( \
    (state == EXPORT_PUBLISHED && event == EXPORT_PUBLISH) -> EXPORT_PUBLISHED : ( \
    (state == EXPORT_PUBLISHED && event == EXPORT_REVOKE) -> EXPORT_COMPUTING : ( \
    (state == EXPORT_PUBLISHED && event == EXPORT_LOSE) -> EXPORT_LOST : ( \
    (state == EXPORT_PUBLISHED && event == EXPORT_FINISH) -> EXPORT_PINNED : ( \
    (state == EXPORT_PUBLISHED && event == EXPORT_ABORT) -> EXPORT_FREE : ( \
    (state == EXPORT_PUBLISHED && event == EXPORT_LEASE_ENDED) -> EXPORT_LOST : ( \
    (state == EXPORT_LOST && event == EXPORT_PUBLISH) -> EXPORT_LOST : ( \
    (state == EXPORT_LOST && event == EXPORT_REVOKE) -> EXPORT_LOST : ( \
    (state == EXPORT_LOST && event == EXPORT_LOSE) -> EXPORT_LOST : ( \
    (state == EXPORT_LOST && event == EXPORT_ABORT) -> EXPORT_FREE : ( \
    (state == EXPORT_PINNED && event == EXPORT_ABORT) -> EXPORT_FREE : ( \
    (state == EXPORT_PINNED && event == EXPORT_LEASE_ENDED) -> EXPORT_FREE : ( \
    NOTHING )))))))))))))))))

#define IMPORT_ASKING 0
#define IMPORT_CLAIMED 1
#define IMPORT_READING 2
#define IMPORT_ENDING 3
#define IMPORT_REFUSED 4
#define IMPORT_ENDED 5

#define IMPORT_PUBLISH 0
#define IMPORT_REFUSE 1
#define IMPORT_ALLOCATE 2
#define IMPORT_LAST 3
#define IMPORT_END 4

#define AFTER_IMPORT(state, event) ( \
    (state == IMPORT_ASKING && event == IMPORT_PUBLISH) -> IMPORT_CLAIMED : ( \
    (state == IMPORT_ASKING && event == IMPORT_REFUSE) -> IMPORT_REFUSED : ( \
    (state == IMPORT_ASKING && event == IMPORT_END) -> IMPORT_ENDED : ( \
    (state == IMPORT_CLAIMED && event == IMPORT_PUBLISH) -> IMPORT_CLAIMED : ( \
    (state == IMPORT_CLAIMED && event == IMPORT_REFUSE) -> IMPORT_REFUSED : ( \
    (state == IMPORT_CLAIMED && event == IMPORT_ALLOCATE) -> IMPORT_READING : ( \
    (state == IMPORT_CLAIMED && event == IMPORT_END) -> IMPORT_ENDED : ( \
    (state == IMPORT_READING && event == IMPORT_PUBLISH) -> IMPORT_READING : ( \
    (state == IMPORT_READING && event == IMPORT_REFUSE) -> IMPORT_ENDING : ( \
    (state == IMPORT_READING && event == IMPORT_LAST) -> IMPORT_ENDING : ( \
    (state == IMPORT_READING && event == IMPORT_END) -> IMPORT_ENDED : ( \
    (state == IMPORT_ENDING && event == IMPORT_END) -> IMPORT_ENDED : ( \
    (state == IMPORT_REFUSED && event == IMPORT_ALLOCATE) -> IMPORT_READING : ( \
    (state == IMPORT_REFUSED && event == IMPORT_END) -> IMPORT_ENDED : ( \
    NOTHING )))))))))))))))
